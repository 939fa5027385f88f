// The part of XLA's FFI that a handler of custom calls needs. Nothing is linked and no header of jaxlib is needed, so
// one build works with every jaxlib, or none.
//
// This is XLA's binary interface, transcribed from the c_api.h of jaxlib 0.6.2, 0.8.2, 0.10.2 and 0.12.0 (versions 0.1,
// 0.2, 0.3 and 0.5), which agree in everything used here. As XLA says there, what moves or removes anything changes the
// major version, and minor versions add to the end. Tests compare this file with the header of the installed jaxlib.
#pragma once

#include <cstddef>
#include <cstdint>

namespace horo {

inline constexpr int kXlaMajor = 0;
inline constexpr int kXlaOldestMinor = 1;

struct XlaExtension {
  size_t struct_size;
  int type;
  XlaExtension* next;
};

struct XlaVersion {
  size_t struct_size;
  XlaExtension* extensions;
  int major;
  int minor;
};

// What XLA asks a handler when it is registered.
inline constexpr int kXlaMetadata = 1;  // in XlaExtension::type
struct XlaMetadata {
  size_t struct_size;
  XlaVersion version;  // filled in by the handler
  uint32_t traits;
};
struct XlaMetadataExtension {
  XlaExtension base;
  XlaMetadata* metadata;
};

struct XlaError;
inline constexpr int kXlaAborted = 10;
struct XlaErrorCreateArgs {
  size_t struct_size;
  XlaExtension* extensions;
  const char* message;
  int code;
};

// XlaBuffer::dtype
inline constexpr int kXlaInt64 = 5;
inline constexpr int kXlaToken = 17;  // orders calls, and has no memory
// Item sizes of the dtypes; 0 if it is not a whole number of bytes, or unknown here.
inline constexpr unsigned char kXlaItemBytes[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0, 0, 8, 2, 0, 16};
struct XlaBuffer {
  size_t struct_size;
  XlaExtension* extensions;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct XlaText {
  const char* data;
  size_t size;
};

inline constexpr int kXlaScalar = 3;  // in XlaAttributes::types
struct XlaScalar {
  int dtype;
  void* value;
};

inline constexpr int kXlaBuffer = 1;  // in XlaOperands::types
struct XlaOperands {
  size_t struct_size;
  XlaExtension* extensions;
  int64_t size;
  int* types;
  void** operands;
};

struct XlaAttributes {
  size_t struct_size;
  XlaExtension* extensions;
  int64_t size;
  int* types;
  XlaText** names;
  void** attributes;
};

struct XlaApi {
  size_t struct_size;
  XlaExtension* extensions;
  XlaVersion version;
  const void* internal;
  XlaError* (*error_create)(XlaErrorCreateArgs* args);
  // More follows.
};

inline constexpr int kXlaExecute = 3;  // in XlaCallFrame::stage
struct XlaCallFrame {
  size_t struct_size;
  XlaExtension* extensions;
  const XlaApi* api;
  void* context;
  int stage;
  XlaOperands arguments;
  XlaOperands results;
  XlaAttributes attributes;
  // More follows.
};

}  // namespace horo
