// The kernels, once for every instruction set: included by kernels_<isa>.cc and by nothing else, after the headers and
// after `#pragma GCC target`. Everything here has internal linkage and uses no templates of the standard library:
// their instantiations would be shared between files and could bring one file's instructions into another's.
//
// D is the dimension, known at compile time so that sums live in registers, or 0: any, with sums in scratch memory.

namespace {

// Vectors of 4, 8 or 16 floats. kLanes of this file: as wide as its instruction set.
template <int L>
struct Vec;
template <>
struct Vec<4> {
  typedef float type __attribute__((vector_size(16)));
};
#if defined(__AVX2__)
template <>
struct Vec<8> {
  typedef float type __attribute__((vector_size(32)));
};
#endif
#if defined(__AVX512F__)
template <>
struct Vec<16> {
  typedef float type __attribute__((vector_size(64)));
};
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#define TC_INLINE inline __attribute__((always_inline))

TC_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
#if defined(__x86_64__)
TC_INLINE Vec<4>::type square_root(Vec<4>::type x) { return _mm_sqrt_ps(x); }
#else
TC_INLINE Vec<4>::type square_root(Vec<4>::type x) {
  for (int i = 0; i < 4; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
#endif
#if defined(__AVX2__)
TC_INLINE Vec<8>::type square_root(Vec<8>::type x) { return _mm256_sqrt_ps(x); }
#endif
#if defined(__AVX512F__)
TC_INLINE Vec<16>::type square_root(Vec<16>::type x) { return _mm512_sqrt_ps(x); }
#endif

template <typename T>
TC_INLINE T load(const float* p) {
  T x;
  __builtin_memcpy(&x, p, sizeof(T));
  return x;
}
template <typename T>
TC_INLINE void store(float* p, const T& x) {
  __builtin_memcpy(p, &x, sizeof(T));
}

template <int D>
inline constexpr int kWidth = D == 0 || D > kLanes ? kLanes : D;

// Calls f(T{}, i) for elements i, i + 1, .. of a row, T a vector or (the tail of any dimension) a float.
template <int D, typename F>
TC_INLINE void for_elements(uint32_t dim, F f) {
  using V = typename Vec<kWidth<D>>::type;
  if constexpr (D != 0) {
#pragma GCC unroll 32
    for (uint32_t i = 0; i < D; i += kWidth<D>) f(V{}, i);
  } else {
    uint32_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) f(V{}, i);
    for (; i < dim; ++i) f(float{}, i);
  }
}

// A sum of rows: in registers when D is known, else in the scratch given.
template <int D>
struct Sum {
  using V = typename Vec<kWidth<D>>::type;
  V v[D / kWidth<D>];
  explicit Sum(float*) {}
  template <typename T>
  TC_INLINE T get(uint32_t i) const {
    return v[i / kWidth<D>];
  }
  template <typename T>
  TC_INLINE void set(uint32_t i, const T& x) {
    v[i / kWidth<D>] = x;
  }
};
template <>
struct Sum<0> {
  float* p;
  explicit Sum(float* scratch) : p(scratch) {}
  template <typename T>
  TC_INLINE T get(uint32_t i) const {
    return load<T>(p + i);
  }
  template <typename T>
  TC_INLINE void set(uint32_t i, const T& x) {
    store(p + i, x);
  }
};

// The lines of a row: its first bytes are enough for long rows, the hardware follows.
template <int D>
TC_INLINE void prefetch(const void* row, size_t bytes) {
  const char* p = static_cast<const char*>(row);
  if constexpr (D > 0 && D <= 16) {
    __builtin_prefetch(p);
    __builtin_prefetch(p + bytes - 1);
  } else {
    const size_t lines = bytes < 512 ? bytes : 512;
    for (size_t b = 0; b < lines; b += 64) __builtin_prefetch(p + b);
    __builtin_prefetch(p + lines - 1);
  }
}

// ---- hashes

void hash_keys(const uint64_t* __restrict keys, size_t n, uint64_t* __restrict out) {
  for (size_t i = 0; i < n; ++i) out[i] = hash_key(keys[i]);
}

void mem_hash_keys(const uint64_t* __restrict keys, size_t n, uint64_t* __restrict out) {
  for (size_t i = 0; i < n; ++i) out[i] = mem_hash(hash_key(keys[i]));
}

constexpr size_t kAheadIds = 24;
constexpr size_t kAheadKeys = 8;

// ---- gather + pool

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

// ---- sums of gradients

// At least one occurrence: a block is never empty.
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

// ---- optimizers

// Adds the upper half of the lanes to the lower half, until one is left.
TC_INLINE float add_halves(Vec<4>::type x) {
  const float a = x[0] + x[2], b = x[1] + x[3];
  return a + b;
}
#if defined(__AVX2__)
TC_INLINE float add_halves(Vec<8>::type x) {
  return add_halves(__builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7));
}
#endif
#if defined(__AVX512F__)
TC_INLINE float add_halves(Vec<16>::type x) {
  return add_halves(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}
#endif

template <int D>
TC_INLINE float mean_of_squares(uint32_t dim, const Sum<D>& g) {
  if constexpr (D != 0) {
    // Vectors of 16 lanes, or as many as the row has, made of one or more of ours.
    constexpr int kParts = (D < 16 ? D : 16) / kWidth<D>;
    typename Sum<D>::V lanes[kParts] = {};
    for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
      const auto x = g.template get<decltype(zero)>(i);
      lanes[i / kWidth<D> % kParts] += x * x;
    });
    for (int half = kParts / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
    }
    return add_halves(lanes[0]) / static_cast<float>(D);
  } else {
    float lanes[16] = {};
    for (uint32_t i = 0; i < dim; ++i) {
      const float x = g.template get<float>(i);
      lanes[i % 16] = lanes[i % 16] + x * x;
    }
    for (int half = 8; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
    }
    return lanes[0] / static_cast<float>(dim);
  }
}

// The element-wise parts; T is a vector or a float.
template <Optimizer O>
struct Rule;
template <>
struct Rule<Optimizer::kSgd> {
  template <typename T>
  static TC_INLINE void apply(float* w, const T& g, uint32_t, const Step& s) {
    store(w, T(load<T>(w) - g * s.lr));
  }
};
template <>
struct Rule<Optimizer::kAdagrad> {
  template <typename T>
  static TC_INLINE void apply(float* w, const T& g, uint32_t dim, const Step& s) {
    const T sum = load<T>(w + dim) + g * g;
    store(w + dim, sum);
    store(w, T(load<T>(w) - (g / (square_root(sum) + s.eps)) * s.lr));
  }
};
template <>
struct Rule<Optimizer::kAdam> {
  template <typename T>
  static TC_INLINE void apply(float* w, const T& g, uint32_t dim, const Step& s) {
    const T m0 = load<T>(w + dim);
    const T m = m0 + (g - m0) * s.one_minus_beta1;
    const T v = load<T>(w + 2 * dim) * s.beta2 + (g * s.one_minus_beta2) * g;
    store(w + dim, m);
    store(w + 2 * dim, v);
    store(w, T(load<T>(w) - (m * s.step_size) / (square_root(v) / s.sqrt_bias2 + s.eps)));
  }
};

template <int D, Optimizer O>
TC_INLINE void apply_row(float* row, uint32_t dim, Sum<D>& g, const Step& s) {
  for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
    using T = decltype(zero);
    T x = g.template get<T>(i) * s.scale;
    if (s.weight_decay != 0) x = x + load<T>(row + i) * s.weight_decay;
    g.set(i, x);
  });
  if constexpr (O == Optimizer::kRowWiseAdagrad) {
    const float sum = row[dim] + mean_of_squares<D>(dim, g);
    row[dim] = sum;
    const float rate = s.lr / (square_root(sum) + s.eps);
    for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
      using T = decltype(zero);
      store(row + i, T(load<T>(row + i) - g.template get<T>(i) * rate));
    });
  } else {
    for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
      using T = decltype(zero);
      Rule<O>::template apply<T>(row + i, g.template get<T>(i), dim, s);
    });
  }
}

template <int D, Optimizer O>
void update(const Rows& rows, const uint32_t* slots, const SegmentArgs& s, const Step& step, size_t begin, size_t end,
            uint32_t hot, float* scratch) {
  const uint32_t dim = D ? D : rows.dim;
  for (size_t u = begin; u < end; ++u) {
    if (u + kAheadKeys < end) prefetch<D>(rows.base + slots[u + kAheadKeys] * rows.stride, rows.stride);
    const size_t lo = s.starts[u], hi = s.starts[u + 1];
    if (hi - lo > hot) continue;
    Sum<D> total(scratch);
    add_segment<D>(dim, s, lo, hi, total, scratch + dim);
    apply_row<D, O>(reinterpret_cast<float*>(rows.base + slots[u] * rows.stride), dim, total, step);
  }
}

template <int D, Optimizer O>
void apply(const Rows& rows, const uint32_t* slots, const float* sums, const Step& step, size_t begin, size_t end,
           float* scratch) {
  const uint32_t dim = D ? D : rows.dim;
  for (size_t u = begin; u < end; ++u) {
    if (u + kAheadKeys < end) prefetch<D>(rows.base + slots[u + kAheadKeys] * rows.stride, rows.stride);
    Sum<D> g(scratch);
    for_elements<D>(dim, [&](auto zero, uint32_t i)
                             __attribute__((always_inline)) { g.set(i, load<decltype(zero)>(sums + u * dim + i)); });
    apply_row<D, O>(reinterpret_cast<float*>(rows.base + slots[u] * rows.stride), dim, g, step);
  }
}

// ---- choice of D and optimizer

// Under AddressSanitizer each size takes the compiler half a minute: one fixed size then, and the one for any.
#if defined(__SANITIZE_ADDRESS__)
#define TC_FOR_DIM(dim, call) \
  switch (dim) {              \
    case 16:                  \
      return call(16);        \
    default:                  \
      return call(0);         \
  }
#else
#define TC_FOR_DIM(dim, call) \
  switch (dim) {              \
    case 4:                   \
      return call(4);         \
    case 8:                   \
      return call(8);         \
    case 16:                  \
      return call(16);        \
    case 32:                  \
      return call(32);        \
    case 64:                  \
      return call(64);        \
    case 128:                 \
      return call(128);       \
    default:                  \
      return call(0);         \
  }
#endif

void any_pool(const PoolArgs& a, size_t begin, size_t end, float* scratch) {
#define TC_CALL(D) pool<D>(a, begin, end, scratch)
  TC_FOR_DIM(a.rows.dim, TC_CALL)
#undef TC_CALL
}

void any_sum(uint32_t dim, const SegmentArgs& s, size_t begin, size_t end, uint32_t hot, float* sums, float* scratch) {
#define TC_CALL(D) sum<D>(dim, s, begin, end, hot, sums, scratch)
  TC_FOR_DIM(dim, TC_CALL)
#undef TC_CALL
}

void any_blocks(uint32_t dim, const SegmentArgs& s, size_t begin, size_t end, float* sums, float* scratch) {
#define TC_CALL(D) blocks<D>(dim, s, begin, end, sums, scratch)
  TC_FOR_DIM(dim, TC_CALL)
#undef TC_CALL
}

template <Optimizer O>
void update_with(const Rows& rows, const uint32_t* slots, const SegmentArgs& s, const Step& step, size_t begin,
                 size_t end, uint32_t hot, float* scratch) {
#define TC_CALL(D) update<D, O>(rows, slots, s, step, begin, end, hot, scratch)
  TC_FOR_DIM(rows.dim, TC_CALL)
#undef TC_CALL
}

template <Optimizer O>
void apply_with(const Rows& rows, const uint32_t* slots, const float* sums, const Step& step, size_t begin, size_t end,
                float* scratch) {
#define TC_CALL(D) apply<D, O>(rows, slots, sums, step, begin, end, scratch)
  TC_FOR_DIM(rows.dim, TC_CALL)
#undef TC_CALL
}

void any_update(const Rows& rows, const uint32_t* slots, const SegmentArgs& s, const Step& step, size_t begin,
                size_t end, uint32_t hot, float* scratch) {
  switch (step.optimizer) {
    case Optimizer::kSgd:
      return update_with<Optimizer::kSgd>(rows, slots, s, step, begin, end, hot, scratch);
    case Optimizer::kAdagrad:
      return update_with<Optimizer::kAdagrad>(rows, slots, s, step, begin, end, hot, scratch);
    case Optimizer::kRowWiseAdagrad:
      return update_with<Optimizer::kRowWiseAdagrad>(rows, slots, s, step, begin, end, hot, scratch);
    case Optimizer::kAdam:
      return update_with<Optimizer::kAdam>(rows, slots, s, step, begin, end, hot, scratch);
  }
}

void any_apply(const Rows& rows, const uint32_t* slots, const float* sums, const Step& step, size_t begin, size_t end,
               float* scratch) {
  switch (step.optimizer) {
    case Optimizer::kSgd:
      return apply_with<Optimizer::kSgd>(rows, slots, sums, step, begin, end, scratch);
    case Optimizer::kAdagrad:
      return apply_with<Optimizer::kAdagrad>(rows, slots, sums, step, begin, end, scratch);
    case Optimizer::kRowWiseAdagrad:
      return apply_with<Optimizer::kRowWiseAdagrad>(rows, slots, sums, step, begin, end, scratch);
    case Optimizer::kAdam:
      return apply_with<Optimizer::kAdam>(rows, slots, sums, step, begin, end, scratch);
  }
}

}  // namespace
