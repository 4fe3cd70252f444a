// Vectors, loads, stores, row sums and prefetches of the kernels. Included by kernels_impl.h only.

namespace {

// Vectors of 4, 8 or 16 floats. kLanes: the widest vector of the instruction set.
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

// Calls f(T{}, i) for every vector of a row, i its first element. T is a vector, or a float for the tail if D is 0.
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

// Sum of rows: in registers if D is known at compile time, else in the scratch memory.
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

// Adds the upper half of the lanes to the lower half until one lane is left.
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

// Sums f(T{}, i), a vector or a float, over the elements of a row in the order of sum() (kernels.h).
template <int D, typename F>
TC_INLINE float sum_of(uint32_t dim, F f) {
  if constexpr (D != 0) {
    // min(D, 16) lanes, in kParts vectors of the instruction set.
    constexpr int kParts = (D < 16 ? D : 16) / kWidth<D>;
    typename Vec<kWidth<D>>::type lanes[kParts] = {};
    for_elements<D>(dim, [&](auto zero, uint32_t i)
                             __attribute__((always_inline)) { lanes[i / kWidth<D> % kParts] += f(zero, i); });
    for (int half = kParts / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
    }
    return add_halves(lanes[0]);
  } else {
    float lanes[16] = {};
    for (uint32_t i = 0; i < dim; ++i) lanes[i % 16] = lanes[i % 16] + f(float{}, i);
    for (int half = 8; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
    }
    return lanes[0];
  }
}

// Prefetches the cache lines of a row. For long rows the first 512 bytes suffice: the hardware prefetcher continues.
template <int D>
TC_INLINE void prefetch(const void* row, size_t bytes) {
  const char* p = static_cast<const char*>(row);
  if constexpr (D > 0 && D <= 16) {
    __builtin_prefetch(p);
    for (size_t b = 64; b < bytes; b += 64) __builtin_prefetch(p + b);  // a whole row: with state and statistics
    __builtin_prefetch(p + bytes - 1);
  } else {
    const size_t lines = bytes < 512 ? bytes : 512;
    for (size_t b = 0; b < lines; b += 64) __builtin_prefetch(p + b);
    __builtin_prefetch(p + lines - 1);
  }
}

}  // namespace
