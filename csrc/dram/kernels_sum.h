// Hashing, pooling and gradient sums. Included by kernels_impl.h only, after kernels_vec.h.

namespace {

constexpr size_t kAheadIds = 24;  // prefetch distance
constexpr size_t kAheadKeys = 8;

// ---- hashes

void hash_keys(const uint64_t* __restrict keys, size_t n, uint64_t* __restrict out) {
  for (size_t i = 0; i < n; ++i) out[i] = hash_key(keys[i]);
}

void mem_hash_keys(const uint64_t* __restrict keys, size_t n, uint64_t* __restrict out) {
  for (size_t i = 0; i < n; ++i) out[i] = mem_hash(hash_key(keys[i]));
}

// ---- gather and pool

template <int D, bool kWeighted>
TC_INLINE void pool_bag(const PoolArgs& a, size_t lo, size_t hi, float* out, float* scratch) {
  const uint32_t dim = D ? D : a.rows.dim;
  if (lo == hi) {
    for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) { store(out + i, zero); });
    return;
  }
  Sum<D> sum(scratch);
  const auto term = [&](size_t p, auto zero, uint32_t i) __attribute__((always_inline)) {
    using T = decltype(zero);
    const T x = load<T>(reinterpret_cast<const float*>(a.rows.base + a.slots[p] * a.rows.stride) + i);
    if constexpr (kWeighted) return T(x * a.weights[p]);
    else return x;
  };
  const auto ahead = [&](size_t p) __attribute__((always_inline)) {
    if (p + kAheadIds < a.ids) {
      prefetch<D>(a.rows.base + a.slots[p + kAheadIds] * a.rows.stride, dim * sizeof(float));
    }
  };
  ahead(lo);
  for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) { sum.set(i, term(lo, zero, i)); });
  for (size_t p = lo + 1; p < hi; ++p) {
    ahead(p);
    for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
      using T = decltype(zero);
      sum.set(i, T(sum.template get<T>(i) + term(p, zero, i)));
    });
  }
  const float len = static_cast<float>(hi - lo);
  for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
    using T = decltype(zero);
    const T x = sum.template get<T>(i);
    store(out + i, a.mean ? T(x / len) : x);
  });
}

template <int D>
void pool(const PoolArgs& a, size_t begin, size_t end, float* scratch) {
  const uint32_t dim = D ? D : a.rows.dim;
  for (size_t b = begin; b < end; ++b) {
    const size_t lo = a.offsets ? a.offsets[b] : b;
    const size_t hi = a.offsets ? a.offsets[b + 1] : b + 1;
    if (a.weights) pool_bag<D, true>(a, lo, hi, a.out + b * dim, scratch);
    else pool_bag<D, false>(a, lo, hi, a.out + b * dim, scratch);
  }
}

// ---- gradient of weights

template <int D>
void weight_gradient(const WeightGradientArgs& w, size_t begin, size_t end) {
  const PoolArgs& a = w.pool;
  const uint32_t dim = D ? D : a.rows.dim;
  for (size_t b = begin; b < end; ++b) {
    const size_t lo = a.offsets ? a.offsets[b] : b;
    const size_t hi = a.offsets ? a.offsets[b + 1] : b + 1;
    const float* grad = w.grads + b * dim;
    const float len = static_cast<float>(hi - lo);
    for (size_t p = lo; p < hi; ++p) {
      if (p + kAheadIds < a.ids) {
        prefetch<D>(a.rows.base + a.slots[p + kAheadIds] * a.rows.stride, dim * sizeof(float));
      }
      const auto* row = reinterpret_cast<const float*>(a.rows.base + a.slots[p] * a.rows.stride);
      const float dot = sum_of<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
        using T = decltype(zero);
        return T(load<T>(row + i) * load<T>(grad + i));
      });
      w.out[p] = a.mean ? dot / len : dot;
    }
  }
}

// ---- gradient sums

// Sums the occurrences [begin, end), at least one.
template <int D>
TC_INLINE void add_block(uint32_t dim, const SegmentArgs& s, size_t begin, size_t end, Sum<D>& sum) {
  const size_t all = s.starts[s.keys];
  const auto term = [&](size_t j, auto zero, uint32_t i) __attribute__((always_inline)) {
    using T = decltype(zero);
    const T x = load<T>(s.grads + s.grad_rows[j] * size_t{dim} + i);
    return T(x * (s.coefs ? s.coefs[j] : 1.0f));  // x * 1.0f is x, bit for bit
  };
  const auto ahead = [&](size_t j) __attribute__((always_inline)) {
    if (j + kAheadIds < all) prefetch<D>(s.grads + s.grad_rows[j + kAheadIds] * size_t{dim}, dim * sizeof(float));
  };
  ahead(begin);
  for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) { sum.set(i, term(begin, zero, i)); });
  for (size_t j = begin + 1; j < end; ++j) {
    ahead(j);
    for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
      using T = decltype(zero);
      sum.set(i, T(sum.template get<T>(i) + term(j, zero, i)));
    });
  }
}

template <int D>
TC_INLINE void add_segment(uint32_t dim, const SegmentArgs& s, size_t begin, size_t end, Sum<D>& total,
                           float* scratch) {
  add_block<D>(dim, s, begin, end < begin + kBlock ? end : begin + kBlock, total);
  for (size_t b = begin + kBlock; b < end; b += kBlock) {
    Sum<D> block(scratch);
    add_block<D>(dim, s, b, end < b + kBlock ? end : b + kBlock, block);
    for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
      using T = decltype(zero);
      total.set(i, T(total.template get<T>(i) + block.template get<T>(i)));
    });
  }
}

template <int D>
TC_INLINE void store_sum(uint32_t dim, const Sum<D>& sum, float* out) {
  for_elements<D>(dim, [&](auto zero, uint32_t i)
                           __attribute__((always_inline)) { store(out + i, sum.template get<decltype(zero)>(i)); });
}

template <int D>
void sum(uint32_t any_dim, const SegmentArgs& s, size_t begin, size_t end, uint32_t hot, float* sums, float* scratch) {
  const uint32_t dim = D ? D : any_dim;
  for (size_t u = begin; u < end; ++u) {
    const size_t lo = s.starts[u], hi = s.starts[u + 1];
    if (hi - lo > hot) continue;
    Sum<D> total(scratch);
    add_segment<D>(dim, s, lo, hi, total, scratch + dim);
    store_sum<D>(dim, total, sums + u * dim);
  }
}

template <int D>
void blocks(uint32_t any_dim, const SegmentArgs& s, size_t begin, size_t end, float* sums, float* scratch) {
  const uint32_t dim = D ? D : any_dim;
  for (size_t b = begin; b < end; b += kBlock, sums += dim) {
    Sum<D> block(scratch);
    add_block<D>(dim, s, b, end < b + kBlock ? end : b + kBlock, block);
    store_sum<D>(dim, block, sums);
  }
}

}  // namespace
