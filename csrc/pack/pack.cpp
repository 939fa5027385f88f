// Chooses, once, which build of the kernels this machine can run.
#include "pack/pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace horo {
namespace {

#if defined(__x86_64__)
struct Features {
  bool avx2, avx512;
};

// What the processor has and the system allows, that is, the registers of which it saves. This does not call
// __builtin_cpu_supports(): zig's Clang, which builds the wheels, comes without the library it needs.
Features features() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0, saved = 0;
  const auto has = [](unsigned value, unsigned bits) { return (value & bits) == bits; };
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || !has(ecx, bit_OSXSAVE | bit_AVX | bit_F16C)) return {};
  asm("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return {};
  constexpr unsigned kYmm = 0x06, kZmm = 0xe6;
  return {has(saved, kYmm) && has(ebx, bit_AVX2),
          has(saved, kZmm) && has(ebx, bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL)};
}
#endif

struct InstructionSet {
  const char* name;
  SelectKernels select;
  CopyBytes copy_bytes;
  bool available;
};

const InstructionSet* instruction_sets() {
  static const InstructionSet sets[] = {
#if HORO_LITE_AVX512
      {"avx512", avx512::select, avx512::copy_bytes, features().avx512},
#endif
#if HORO_LITE_AVX2
      {"avx2", avx2::select, avx2::copy_bytes, features().avx2},
#endif
      {"portable", portable::select, portable::copy_bytes, true},
      {nullptr, nullptr, nullptr, false}};
  return sets;
}

const InstructionSet* best() {
  const InstructionSet* set = instruction_sets();
  while (!set->available) ++set;
  return set;
}

std::atomic<const InstructionSet*>& chosen() {
  static std::atomic<const InstructionSet*> set{best()};
  return set;
}

}  // namespace

const Kernels& select_kernels(DType dtype, Wire wire, Op op) {
  const Kernels* kernels = chosen().load()->select(dtype, wire, op);
  if (kernels == nullptr) {
    throw std::invalid_argument(std::string("the average of ") + dtype_name(dtype) +
                                " has no meaning: use Sum (any), Product (all), Min or Max");
  }
  return *kernels;
}

void copy_bytes(void* to, const void* from, size_t n_bytes, Stores stores) {
  chosen().load()->copy_bytes(to, from, n_bytes, stores);
}

void finish_stores(Stores stores) {
#if defined(__x86_64__)
  if (stores == Stores::kStreaming) _mm_sfence();
#else
  static_cast<void>(stores);
#endif
}

Weighting weighting(Op op, const std::vector<double>& weights) {
  if (op != Op::kWeightedAverage) return {{}, op == Op::kAverage ? static_cast<double>(weights.size()) : 1.0};
  const double largest = *std::max_element(weights.begin(), weights.end());
  if (!(largest > 0.0)) {
    throw std::invalid_argument(
        "every rank passed weight 0, and there is no average of no samples: at least one rank "
        "needs a positive weight");
  }
  // In two steps, since the sum itself may be too large for a double.
  Weighting result;
  double total = 0.0;
  for (const double weight : weights) total += std::ldexp(weight, -std::ilogb(largest));
  const int exponent = -1 - std::ilogb(total);
  for (const double weight : weights) {
    result.weights.push_back(std::ldexp(std::ldexp(weight, -std::ilogb(largest)), exponent));
  }
  double units = 0.0;  // exact
  for (const double weight : result.weights) units += in_weight_units(weight);
  result.divisor = units / kWeightUnits;
  return result;
}

const char* instruction_set() { return chosen().load()->name; }

void use_instruction_set(const char* name) {
  for (const InstructionSet* set = instruction_sets(); set->name != nullptr; ++set) {
    if (std::string(name) == set->name && set->available) {
      chosen().store(set);
      return;
    }
  }
  throw std::invalid_argument(std::string("this machine or build has no instruction set named ") + name);
}

}  // namespace horo
