// Numbers without ranks: the kernels of every instruction set, and comparisons of replicas.
#include <unistd.h>

#include "ranks.h"

namespace horo {
namespace {

// Encodes, reduces and decodes like ShmGroup::allreduce, through images of exactly the size of a chunk.
uint64_t reduce_alone(const Reduction& what, size_t chunk_bytes, bool any_bits) {
  const size_t n_ranks = what.weights.size();
  std::vector<Tensors> tensors;
  std::vector<Layout> layouts;
  for (size_t r = 0; r < n_ranks; ++r) {
    Tensors& mine = tensors.emplace_back(what, r);
    Random random(what.seed + static_cast<unsigned>(r));
    for (const TensorRef& ref : mine.refs) {
      const size_t n_bytes = any_bits && ref.dtype != DType::kLongDouble ? ref.n_elements * item_bytes(ref.dtype) : 0;
      for (size_t i = 0; i < n_bytes; ++i) static_cast<uint8_t*>(ref.address)[i] = static_cast<uint8_t>(random());
    }
    layouts.emplace_back(mine.refs, what.op, what.wire, chunk_bytes, static_cast<int>(n_ranks));
  }
  Weighting weights = weighting(what.op, what.weights);
  double scale = 1.0;
  if (any_bits) {  // also factors by which most integers overflow
    const double factors[] = {0.0, 5e-324, 1e-9, 0.3, 1.0, 3e4, 1e30, 1e300};
    Random random(what.seed);
    if (random() % 2 == 0) weights.weights.assign(n_ranks, factors[random() % std::size(factors)]);
    if (random() % 2 == 0) scale = -factors[random() % std::size(factors)];
  }
  for (size_t chunk = 0; chunk < layouts[0].n_chunks(); ++chunk) {
    std::vector<std::unique_ptr<uint8_t[]>> memory;
    std::vector<const uint8_t*> images;
    for (size_t r = 0; r < n_ranks; ++r) {
      // 64 bytes more: at its beginning if malloc aligns to 64, else partly at its end.
      memory.push_back(std::make_unique<uint8_t[]>(kWireAlignment + layouts[r].chunk_size(chunk)));
      images.push_back(memory.back().get() + kWireAlignment -
                       reinterpret_cast<uintptr_t>(memory.back().get()) % kWireAlignment);
    }
    const auto image = [&](size_t r) { return const_cast<uint8_t*>(images[r]); };
    const bool own = what.seed % 2 != 0;
    for (size_t r = 0; r < n_ranks; ++r) {
      for (size_t share = 0; share < n_ranks; ++share) {
        if (share != r || !own) layouts[r].encode(chunk, static_cast<int>(share), image(r));
      }
    }
    for (size_t r = 0; r < n_ranks; ++r) {
      const int share = static_cast<int>(r);
      layouts[r].reduce(chunk, share, images, own ? share : -1, weights.weights, {scale, weights.divisor}, image(r),
                        true);
    }
    for (size_t r = 0; r < n_ranks; ++r) {
      for (size_t share = 0; share < n_ranks; ++share) {
        if (share != r) layouts[r].decode(chunk, static_cast<int>(share), image(share));
      }
    }
  }
  for (size_t r = 0; r < n_ranks; ++r) {
    expect(tensors[r].hash() == tensors[0].hash() || what.sizes.empty(), "all ranks have the same bits");
    if (!any_bits) check_result(what, tensors[r], static_cast<int>(n_ranks), static_cast<int>(n_ranks));
  }
  // When two NaNs are added, the compiler chooses whose bits to keep.
  for (size_t t = 0; t < what.sizes.size(); ++t) {
    for (size_t i = 0; i < what.sizes[t]; ++i) {
      uint8_t* element = tensors[0].at(t, i);
      if (std::isnan(number_at(what.dtypes[t], element).real)) std::memset(element, 0xff, item_bytes(what.dtypes[t]));
    }
  }
  return tensors[0].hash();
}

}  // namespace

void kernels(unsigned seed) {
  Random random(seed);
  const std::string best = instruction_set();
  for (const DType dtype : kDTypes) {
    for (const Wire wire : kWires) {
      for (const Op op : kOps) {
        if (dtype == DType::kBool && is_average(op)) continue;
        Reduction what{op, wire, {}, {}, {}, 0};
        for (const size_t n : {0u, 1u, 7u, 9u, 31u, 1023u + static_cast<unsigned>(random() % 3), 1100u}) {
          what.dtypes.push_back(dtype);
          what.sizes.push_back(n);
        }
        what.dtypes.insert(what.dtypes.begin(), DType::kFloat32);  // the rest has different offsets on the wire
        what.sizes.insert(what.sizes.begin(), random() % 40);
        what.draw_weights(random, 1 + static_cast<int>(random() % 3));
        const size_t chunk_bytes = random() % 20000;
        uint64_t hashes[2] = {0, 0};
        for (const char* isa : {"portable", "avx2", "avx512"}) {
          try {
            use_instruction_set(isa);
          } catch (const std::invalid_argument&) {
            continue;  // not on this machine, or not in this build
          }
          for (const bool any_bits : {false, true}) {
            const uint64_t hash = reduce_alone(what, chunk_bytes, any_bits);
            if (hashes[any_bits] == 0) hashes[any_bits] = hash;
            expect(hash == hashes[any_bits], std::string(isa) + " gives the same bits for " + dtype_name(dtype) +
                                                 ", op " + std::to_string(static_cast<int>(op)) + ", wire " +
                                                 std::to_string(static_cast<int>(wire)));
          }
        }
      }
    }
  }
  use_instruction_set(best.c_str());
}

// Replicas that differ in one element are detected.
void replicas(unsigned seed) {
  Random random(seed);
  for (const DType dtype : kDTypes) {
    Reduction what{Op::kSum, Wire::kNone, {dtype}, {1 + random() % 100}, {}, static_cast<unsigned>(random())};
    const Tensors a(what, 0);
    Tensors b(what, 0);
    expect(a.hash() == b.hash() && difference(a.refs[0], b.refs[0]).n_elements == 0, "equal replicas are equal");
    *b.at(0, random() % what.sizes[0]) ^= 1;
    expect(a.hash() != b.hash() && difference(a.refs[0], b.refs[0]).n_elements == 1, "one bit makes a difference");
    expect(count_non_finite(a.refs[0]).n_nan + count_non_finite(a.refs[0]).n_inf == 0, "all is finite");
  }
  // Memory as shared by processes; here it is mapped twice by one.
  Segment segment = Segment::create(5000);
  Segment seen = Segment::open(getpid(), segment.fd(), 5000, segment.token());
  segment.data()[4999] = 7;
  expect(seen.data()[4999] == 7, "both see the same memory");
  Segment adopted = Segment::adopt(segment.fd(), 5000 + 4096);  // as if it belonged to another library
  expect(adopted.data()[4096 + 4999] == 7, "what is adopted is the same memory");
  Segment found = Segment::open(getpid(), adopted.fd(), 5000 + 4096, adopted.token());
  expect(found.data()[4096 + 4999] == 7, "others find what is adopted");
  seen.make_private();
  seen.data()[4999] = 8;
  expect(segment.data()[4999] == 7, "what is private is seen by nobody");
}

}  // namespace horo
