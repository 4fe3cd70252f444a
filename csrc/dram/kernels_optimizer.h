// Optimizers (kernels.h defines the arithmetic). Included by kernels_impl.h only, after kernels_sum.h.

namespace {

template <int D>
TC_INLINE float mean_of_squares(uint32_t dim, const Sum<D>& g) {
  return sum_of<D>(dim,
                   [&](auto zero, uint32_t i) __attribute__((always_inline)) {
                     const auto x = g.template get<decltype(zero)>(i);
                     return x * x;
                   }) /
         static_cast<float>(dim);
}

// Element-wise part of an optimizer; T is a vector or a float.
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
    T x = g.template get<T>(i) * s.grad_scale;
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
  } else if constexpr (O == Optimizer::kPartialRowWiseAdam) {
    const float v = row[2 * dim] * s.beta2 + mean_of_squares<D>(dim, g) * s.one_minus_beta2;
    row[2 * dim] = v;
    const float denominator = square_root(v) / s.sqrt_bias2 + s.eps;
    for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) {
      using T = decltype(zero);
      const T m0 = load<T>(row + dim + i);
      const T m = m0 + (g.template get<T>(i) - m0) * s.one_minus_beta1;
      store(row + dim + i, m);
      store(row + i, T(load<T>(row + i) - (m * s.step_size) / denominator));
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

// Index of the last step in a row.
template <Optimizer O>
TC_INLINE size_t last_step_index(uint32_t dim) {
  switch (O) {
    case Optimizer::kSgd:
      return dim;
    case Optimizer::kAdagrad:
      return size_t{2} * dim;
    case Optimizer::kRowWiseAdagrad:
      return size_t{dim} + 1;
    case Optimizer::kAdam:
      return size_t{3} * dim;
    case Optimizer::kPartialRowWiseAdam:
      return size_t{2} * dim + 1;
  }
}

template <int D, Optimizer O>
void catch_up(const Rows& rows, const uint32_t* slots, const MissedSteps& missed, size_t begin, size_t end,
              float* scratch) {
  const uint32_t dim = D ? D : rows.dim;
  // Without L2 and momentum a step without a gradient changes nothing.
  const bool changes = has_moments(O) || missed.step.weight_decay != 0;
  Step s = missed.step;
  for (size_t u = begin; u < end; ++u) {
    if (slots && u + kAheadKeys < end) prefetch<D>(rows.base + slots[u + kAheadKeys] * rows.stride, rows.stride);
    auto* row = reinterpret_cast<float*>(rows.base + (slots ? slots[u] : u) * rows.stride);
    uint32_t last;
    __builtin_memcpy(&last, row + last_step_index<O>(dim), sizeof(last));
    if (last >= missed.stamp) continue;
    if (changes && last < missed.target) {
      const uint32_t skipped = missed.target > missed.limit ? missed.target - missed.limit : 0;
      for (uint32_t n = (last > skipped ? last : skipped) + 1; n <= missed.target; ++n) {
        s.lr = s.step_size = missed.rates[n % missed.limit];
        s.sqrt_bias2 = missed.biases[n % missed.limit];
        Sum<D> g(scratch);
        for_elements<D>(dim, [&](auto zero, uint32_t i) __attribute__((always_inline)) { g.set(i, zero); });
        apply_row<D, O>(row, dim, g, s);
      }
    }
    __builtin_memcpy(row + last_step_index<O>(dim), &missed.stamp, sizeof(missed.stamp));
  }
}

}  // namespace
