// The position of every element of a list of tensors on the wire: chunks that fit in cache, each divided into shares.
//
// A tensor is cut into blocks (see pack.h), blocks are grouped into chunks, and a chunk is divided into a share for
// each rank. None of this affects results: the arithmetic of an element depends on its own block only (and on its
// share, if messages are quantized: see deal()).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "pack/pack.h"

namespace horo {

struct TensorRef {
  void* address;
  size_t n_elements;
  DType dtype;
  // Where a reduction reads this rank's contribution; it writes the result to `address`. nullptr: it reads there, too.
  const void* source = nullptr;
  // What quantized messages of this rank have lacked so far: see QuantizeArgs. nullptr: nothing is kept.
  float* residual = nullptr;
};

// A run of blocks of one tensor inside one share.
struct Piece {
  uint32_t tensor;
  size_t first;  // element, at a block boundary
  size_t n_elements;
  size_t offset;  // bytes from the start of the chunk's wire image
};

class Layout {
 public:
  // Every rank must pass the same sizes, dtypes and options.
  Layout(std::vector<TensorRef> tensors, Op op, Wire wire, size_t chunk_bytes, int n_shares)
      : tensors_(std::move(tensors)), n_shares_(n_shares) {
    select(op, wire);
    pieces_.reserve(tensors_.size());
    cut(0, tensors_.size(), chunk_bytes, [&](const std::vector<Piece>& runs, size_t n_bytes) {
      if (is_quantized_) deal(runs);
      else divide(runs, n_bytes);
    });
  }

  // Share s consists of parts[s] only. A chunk holds as much of every part as there is room for; if one block of each
  // part does not fit into a chunk, the parts take turns.
  Layout(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire, size_t chunk_bytes)
      : n_shares_(static_cast<int>(parts.size())) {
    for (const std::vector<TensorRef>& part : parts) tensors_.insert(tensors_.end(), part.begin(), part.end());
    select(op, wire);
    size_t largest_block = 1;
    for (const Kernels* kernels : kernels_) largest_block = std::max(largest_block, kernels->block_bytes);
    const size_t together = std::clamp<size_t>(chunk_bytes / largest_block, 1, std::max<size_t>(1, parts.size()));
    const size_t part_bytes = chunk_bytes / together / kWireAlignment * kWireAlignment;
    size_t tensor = 0;
    for (size_t part = 0; part < parts.size(); part += together) {
      std::vector<std::vector<Run>> turn(parts.size());  // of each part, chunk by chunk
      size_t n_chunks = 0;
      for (size_t p = part; p < std::min(parts.size(), part + together); ++p) {
        cut(tensor, tensor + parts[p].size(), part_bytes,
            [&](const std::vector<Piece>& runs, size_t n_bytes) { turn[p].push_back({runs, n_bytes}); });
        tensor += parts[p].size();
        n_chunks = std::max(n_chunks, turn[p].size());
      }
      for (size_t chunk = 0; chunk < n_chunks; ++chunk) join(turn, chunk);
    }
  }

  size_t n_chunks() const { return chunk_sizes_.size(); }
  int n_shares() const { return n_shares_; }
  size_t chunk_size(size_t chunk) const { return chunk_sizes_[chunk]; }
  size_t largest_chunk() const {
    return chunk_sizes_.empty() ? 0 : *std::max_element(chunk_sizes_.begin(), chunk_sizes_.end());
  }

  // Share `share` covers bytes [begin, end) of the chunk's wire image.
  size_t share_begin(size_t chunk, int share) const { return share_offsets_[chunk * (n_shares_ + 1) + share]; }
  size_t share_end(size_t chunk, int share) const { return share_offsets_[chunk * (n_shares_ + 1) + share + 1]; }

  // `image` is the start of the whole chunk's wire image in each of these.
  void encode(size_t chunk, int share, uint8_t* image, Stores stores = Stores::kCached) const {
    for (const Piece& piece : pieces(chunk, share)) {
      kernels_[piece.tensor]->encode(from(piece), piece.n_elements, image + piece.offset, stores);
    }
    finish_stores(stores);
  }

  void decode(size_t chunk, int share, const uint8_t* image) const {
    for (const Piece& piece : pieces(chunk, share)) {
      kernels_[piece.tensor]->decode(image + piece.offset, piece.n_elements, to(piece));
    }
  }

  // Reduces the contributors' images, in rank order, to the result's image, and to the tensors if `to_tensors`. The
  // contribution of rank `own` (-1: of no rank) is taken from the tensors themselves. There is one weight for each
  // image, or there are none.
  void reduce(size_t chunk, int share, const std::vector<const uint8_t*>& images, int own,
              const std::vector<double>& weights, Factor factor, uint8_t* image, bool to_tensors,
              Stores stores = Stores::kCached) const {
    std::vector<const uint8_t*> wires(images.size());
    if (!weights.empty() && weights.size() != images.size()) {
      throw std::invalid_argument(std::to_string(images.size()) + " contributions, but " +
                                  std::to_string(weights.size()) + " weights");
    }
    for (const Piece& piece : pieces(chunk, share)) {
      for (size_t r = 0; r < images.size(); ++r) {
        wires[r] = images[r] == nullptr ? nullptr : images[r] + piece.offset;
      }
      kernels_[piece.tensor]->reduce({wires.data(), static_cast<int>(images.size()), own, from(piece),
                                      weights.empty() ? nullptr : weights.data(), piece.n_elements, factor,
                                      image + piece.offset, to_tensors ? to(piece) : nullptr, stores});
    }
    finish_stores(stores);
  }

  // The size of a share in a message to another host: that of its image, unless messages are quantized.
  size_t message_bytes(size_t chunk, int share) const {
    if (!is_quantized_) return share_end(chunk, share) - share_begin(chunk, share);
    size_t total = 0;
    for (const Piece& piece : pieces(chunk, share)) total += message_bytes(piece);
    return total;
  }

  // Returns the message with a share of `image`, written to where that share begins in `to`, which may be `image`. If
  // it is not, `image` becomes what the receivers decode. `share_of_result` is as in QuantizeArgs.
  uint8_t* quantize(size_t chunk, int share, uint8_t* image, double share_of_result, uint8_t* to) const {
    if (!is_quantized_) return image + share_begin(chunk, share);
    uint8_t* const message = to + share_begin(chunk, share);
    uint8_t* next = message;
    for (const Piece& piece : pieces(chunk, share)) {
      uint8_t* const values = image + piece.offset;
      float* const residual = tensors_[piece.tensor].residual;
      if (const Quantization* quantization = kernels_[piece.tensor]->quantization) {
        quantization->quantize({reinterpret_cast<float*>(values), piece.n_elements, next, to != image,
                                residual == nullptr ? nullptr : residual + piece.first, share_of_result});
      } else {
        std::memmove(next, values, message_bytes(piece));
      }
      next += message_bytes(piece);
    }
    return message;
  }

  // Where a message is received whose share's image is to be at `place`: at its end, to be decoded from the front.
  uint8_t* message(size_t chunk, int share, uint8_t* place) const {
    return place + (share_end(chunk, share) - share_begin(chunk, share) - message_bytes(chunk, share));
  }

  // Decodes it there.
  void dequantize(size_t chunk, int share, uint8_t* place) const {
    if (!is_quantized_) return;
    const uint8_t* next = message(chunk, share, place);
    for (const Piece& piece : pieces(chunk, share)) {
      uint8_t* const values = place + (piece.offset - share_begin(chunk, share));
      if (const Quantization* quantization = kernels_[piece.tensor]->quantization) {
        quantization->dequantize(next, piece.n_elements, reinterpret_cast<float*>(values));
      } else {
        std::memmove(values, next, message_bytes(piece));
      }
      next += message_bytes(piece);
    }
  }

  // The same for tensors in memory that all ranks have mapped, with the same layout on every rank: `distances[r]` is
  // how far rank r's tensors are from these. The result goes into all of them if `to_all`, else into these. Only for
  // kernels whose wire is the tensor's own format.
  void reduce_in_place(size_t chunk, int share, const std::vector<ptrdiff_t>& distances, Factor factor,
                       bool to_all) const {
    const size_t n_ranks = distances.size();
    for (size_t t = 0; t < tensors_.size(); ++t) {
      if (kernels_[t]->block_bytes != kBlockElements * kernels_[t]->item_bytes) {
        throw std::invalid_argument(std::string("tensors of ") + dtype_name(tensors_[t].dtype) +
                                    " are converted on the wire: they cannot be reduced in place");
      }
    }
    std::vector<uint8_t*> ranks(n_ranks);
    for (const Piece& piece : pieces(chunk, share)) {
      const Kernels& kernels = *kernels_[piece.tensor];
      // Block by block: what is copied to the other ranks' tensors is still in the nearest cache.
      for (size_t first = 0; first < piece.n_elements; first += kBlockElements) {
        const size_t n = std::min(kBlockElements, piece.n_elements - first);
        uint8_t* own = static_cast<uint8_t*>(to(piece)) + first * kernels.item_bytes;
        for (size_t r = 0; r < n_ranks; ++r) ranks[r] = own + distances[r];
        uint8_t* const result = to_all ? ranks[0] : own;
        uint8_t* const copy = to_all ? ranks[n_ranks - 1] : nullptr;
        kernels.reduce({ranks.data(), static_cast<int>(n_ranks), -1, own, nullptr, n, factor, result, copy});
        for (size_t r = 1; to_all && r + 1 < n_ranks; ++r) std::memcpy(ranks[r], result, n * kernels.item_bytes);
      }
    }
  }

 private:
  struct PieceRange {
    const Piece* first;
    const Piece* last;
    const Piece* begin() const { return first; }
    const Piece* end() const { return last; }
  };

  size_t message_bytes(const Piece& piece) const {
    const Kernels& kernels = *kernels_[piece.tensor];
    return kernels.quantization != nullptr ? kernels.quantization->message_bytes(piece.n_elements)
                                           : kernels.wire_bytes(piece.n_elements);
  }

  PieceRange pieces(size_t chunk, int share) const {
    const size_t i = chunk * (n_shares_ + 1) + share;
    return {pieces_.data() + piece_offsets_[i], pieces_.data() + piece_offsets_[i + 1]};
  }

  const void* from(const Piece& piece) const {
    const TensorRef& tensor = tensors_[piece.tensor];
    const void* source = tensor.source == nullptr ? tensor.address : tensor.source;
    return static_cast<const uint8_t*>(source) + piece.first * kernels_[piece.tensor]->item_bytes;
  }

  void* to(const Piece& piece) const {
    return static_cast<uint8_t*>(tensors_[piece.tensor].address) + piece.first * kernels_[piece.tensor]->item_bytes;
  }

  // The part of some tensors that is in one chunk.
  struct Run {
    std::vector<Piece> pieces;
    size_t n_bytes;
  };

  void select(Op op, Wire wire) {
    kernels_.reserve(tensors_.size());
    for (const TensorRef& tensor : tensors_) {
      kernels_.push_back(&select_kernels(tensor.dtype, wire, op));
      is_quantized_ = is_quantized_ || kernels_.back()->quantization != nullptr;
    }
  }

  // Calls close(pieces, n_bytes) with chunk after chunk of the tensors [begin, end).
  template <class Close>
  void cut(size_t begin, size_t end, size_t chunk_bytes, Close close) const {
    std::vector<Piece> pieces;
    size_t chunk_size = 0;
    const auto close_chunk = [&] {
      close(pieces, chunk_size);
      pieces.clear();
      chunk_size = 0;
    };
    for (size_t t = begin; t < end; ++t) {
      const Kernels& kernels = *kernels_[t];
      for (size_t first = 0; first < tensors_[t].n_elements;) {
        const size_t room = chunk_bytes > chunk_size ? chunk_bytes - chunk_size : 0;
        const size_t remaining = tensors_[t].n_elements - first;
        size_t n = room / kernels.block_bytes * kBlockElements;
        if (n == 0 && chunk_size == 0) n = kBlockElements;
        if (n < remaining && remaining < kBlockElements && kernels.wire_bytes(remaining) <= room) n = remaining;
        n = std::min(n, remaining);
        if (n == 0) {
          close_chunk();
          continue;
        }
        pieces.push_back({static_cast<uint32_t>(t), first, n, chunk_size});
        chunk_size += kernels.wire_bytes(n);
        first += n;
      }
    }
    if (!pieces.empty()) close_chunk();
  }

  // Adds a chunk, cut into shares of nearly equal bytes, at block boundaries.
  void divide(const std::vector<Piece>& runs, size_t chunk_size) {
    size_t run = 0;
    size_t done = 0;  // elements of runs[run] already dealt out
    for (int share = 0; share < n_shares_; ++share) {
      const size_t end = chunk_size * (share + 1) / n_shares_;
      begin_share(run < runs.size() ? position(runs[run], done) : chunk_size);
      while (run < runs.size()) {
        const Piece& whole = runs[run];
        const size_t begin = position(whole, done);
        if (begin >= end) break;
        const size_t block_bytes = kernels_[whole.tensor]->block_bytes;
        const size_t n_blocks = (end - begin + block_bytes - 1) / block_bytes;
        const size_t n = std::min(n_blocks * kBlockElements, whole.n_elements - done);
        pieces_.push_back({whole.tensor, whole.first + done, n, begin});
        done += n;
        if (done == whole.n_elements) {
          ++run;
          done = 0;
        }
      }
    }
    end_chunk(chunk_size);
  }

  // Adds a chunk, block by block, so that a block's share depends on its tensor only. The owner of a share is the only
  // one whose contribution is not quantized, and remembers what the result lacks: with other chunks, results would
  // differ, and so depend on what travels together.
  void deal(const std::vector<Piece>& runs) {
    size_t end = 0;
    for (int share = 0; share < n_shares_; ++share) {
      begin_share(end);
      for (const Piece& run : runs) {
        // A hash of the tensor's size: else all tensors of a block would be in the first share.
        const size_t phase = (tensors_[run.tensor].n_elements * size_t{2654435761} >> 16) % n_shares_;
        const size_t block = run.first / kBlockElements + phase;
        const size_t wait = (static_cast<size_t>(share) + n_shares_ - block % n_shares_) % n_shares_;
        for (size_t at = wait * kBlockElements; at < run.n_elements; at += n_shares_ * kBlockElements) {
          const size_t n = std::min(kBlockElements, run.n_elements - at);
          pieces_.push_back({run.tensor, run.first + at, n, end});
          end += kernels_[run.tensor]->wire_bytes(n);
        }
      }
    }
    end_chunk(end);
  }

  // Adds a chunk whose shares are its parts' runs: runs[share][chunk], if there is one.
  void join(const std::vector<std::vector<Run>>& runs, size_t chunk) {
    size_t begin = 0;
    for (const std::vector<Run>& part : runs) {
      begin_share(begin);
      if (chunk >= part.size()) continue;
      for (Piece piece : part[chunk].pieces) {
        piece.offset += begin;
        pieces_.push_back(piece);
      }
      begin += part[chunk].n_bytes;
    }
    end_chunk(begin);
  }

  void begin_share(size_t offset) {
    piece_offsets_.push_back(pieces_.size());
    share_offsets_.push_back(offset);
  }

  void end_chunk(size_t n_bytes) {
    begin_share(n_bytes);
    chunk_sizes_.push_back(n_bytes);
  }

  size_t position(const Piece& run, size_t done) const {
    return run.offset + done / kBlockElements * kernels_[run.tensor]->block_bytes;
  }

  std::vector<TensorRef> tensors_;
  int n_shares_;
  std::vector<const Kernels*> kernels_;
  bool is_quantized_ = false;
  std::vector<Piece> pieces_;
  std::vector<size_t> chunk_sizes_;
  std::vector<size_t> piece_offsets_;  // n_shares + 1 per chunk
  std::vector<size_t> share_offsets_;  // n_shares + 1 per chunk
};

}  // namespace horo
