// Decoding and encoding of quantized rows (codec.h). Included by kernels_impl.h only, after kernels_sum.h. Inner loops
// have no branches, so that the compiler vectorizes them.

namespace {

template <typename To, typename From>
TC_INLINE To bits_as(From x) {
  return __builtin_bit_cast(To, x);
}

// ---- half precision

TC_INLINE float from_fp16(uint32_t h) {
  const uint32_t size = (h & 0x7fff) << 13;
  // A multiplication by a power of two corrects the exponent. Exact, for subnormal numbers too.
  const uint32_t finite = bits_as<uint32_t>(bits_as<float>(size) * 0x1p112f);
  const uint32_t special = size | 0x7f800000;
  return bits_as<float>(((h & 0x8000) << 16) | (size < (0x7c00u << 13) ? finite : special));
}

TC_INLINE float from_bf16(uint32_t h) { return bits_as<float>(h << 16); }

// `u`: 24 random bits; used if kStochastic.
template <bool kStochastic>
TC_INLINE uint32_t to_bf16(float x, uint32_t u) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t more = kStochastic ? u >> 8 : 0x7fff + ((bits >> 16) & 1);
  const uint32_t special = (bits >> 16) | ((bits & 0x7fffff) ? 0x40 : 0);
  return (bits & 0x7f800000) != 0x7f800000 ? (bits + more) >> 16 : special;
}

template <bool kStochastic>
TC_INLINE uint32_t to_fp16(float x, uint32_t u) {
  const uint32_t bits = bits_as<uint32_t>(x), size = bits & 0x7fffffff;
  const uint32_t more = kStochastic ? u >> 11 : 0xfff + ((size >> 13) & 1);
  const uint32_t normal = size + more < 0x47800000 ? (size + more - 0x38000000) >> 13 : 0x7c00;
  // Below the smallest normal number: in units of 2^-24. 1024 units are the smallest normal number.
  const float value = bits_as<float>(size < 0x38800000 ? size : 0);
  const float units = value * 0x1p24f;
  const auto whole = static_cast<int32_t>(units);
  const float rest = units - static_cast<float>(whole);
  const bool up = kStochastic ? static_cast<float>(static_cast<int32_t>(u)) < rest * 0x1p24f
                              : rest > 0.5f || (rest == 0.5f && (whole & 1));
  const uint32_t tiny = static_cast<uint32_t>(whole) + up;
  const uint32_t special = size > 0x7f800000 ? 0x7e00 | ((size >> 13) & 0x3ff) : 0x7c00;
  return ((bits >> 16) & 0x8000) | (size < 0x38800000 ? tiny : size < 0x7f800000 ? normal : special);
}

TC_INLINE uint32_t random24(uint64_t stream, uint32_t i) {
  return static_cast<uint32_t>(counter_bits(stream, i) >> 40);
}

// ---- packing: eight codes of B bits are B bytes

template <int B>
TC_INLINE void unpack(const uint8_t* p, uint32_t dim, float scale, float* out) {
  const auto eight = [&](uint32_t i, uint32_t n, uint32_t bytes) __attribute__((always_inline)) {
    uint64_t w = 0;
    __builtin_memcpy(&w, p, bytes);
    for (uint32_t j = 0; j < n; ++j) {
      const auto code = static_cast<int32_t>(static_cast<int64_t>(w << (64 - B * (j + 1))) >> (64 - B));
      out[i + j] = static_cast<float>(code) * scale;
    }
    p += B;
  };
  uint32_t i = 0;
  for (; i + 8 <= dim; i += 8) eight(i, 8, B);
  if (i < dim) eight(i, dim - i, ((dim - i) * B + 7) / 8);
}

template <int B>
TC_INLINE void pack(const int32_t* codes, uint32_t dim, uint8_t* p) {
  const auto eight = [&](uint32_t i, uint32_t n, uint32_t bytes) __attribute__((always_inline)) {
    uint64_t w = 0;
    for (uint32_t j = 0; j < n; ++j) w |= (static_cast<uint64_t>(codes[i + j]) & ((1u << B) - 1)) << (B * j);
    __builtin_memcpy(p, &w, bytes);
    p += B;
  };
  uint32_t i = 0;
  for (; i + 8 <= dim; i += 8) eight(i, 8, B);
  if (i < dim) eight(i, dim - i, ((dim - i) * B + 7) / 8);
}

#define TC_FOR_BITS(bits, call) \
  switch (bits) {               \
    case 2:                     \
      return call(2);           \
    case 3:                     \
      return call(3);           \
    case 4:                     \
      return call(4);           \
    case 5:                     \
      return call(5);           \
    case 6:                     \
      return call(6);           \
    default:                    \
      return call(7);           \
  }

TC_INLINE void unpack_codes(uint32_t bits, const uint8_t* p, uint32_t dim, float scale, float* out) {
  if (bits == 8) {
    for (uint32_t i = 0; i < dim; ++i) out[i] = static_cast<float>(static_cast<int8_t>(p[i])) * scale;
    return;
  }
  if (bits == 16) {
    for (uint32_t i = 0; i < dim; ++i) {
      int16_t code;
      __builtin_memcpy(&code, p + 2 * i, 2);
      out[i] = static_cast<float>(code) * scale;
    }
    return;
  }
#define TC_CALL(B) unpack<B>(p, dim, scale, out)
  TC_FOR_BITS(bits, TC_CALL)
#undef TC_CALL
}

// For codes of 16 bits only the low 16 bits of `codes` are used.
TC_INLINE void pack_codes(uint32_t bits, const int32_t* codes, uint32_t dim, uint8_t* p) {
  if (bits == 8) {
    for (uint32_t i = 0; i < dim; ++i) p[i] = static_cast<uint8_t>(codes[i]);
    return;
  }
  if (bits == 16) {
    for (uint32_t i = 0; i < dim; ++i) {
      const auto code = static_cast<uint16_t>(codes[i]);
      __builtin_memcpy(p + 2 * i, &code, 2);
    }
    return;
  }
#define TC_CALL(B) pack<B>(codes, dim, p)
  TC_FOR_BITS(bits, TC_CALL)
#undef TC_CALL
}

// ---- rows

TC_INLINE void decode_weights(const Codec& c, const uint8_t* row, float* out) {
  const uint32_t dim = c.layout.dim;
  const Precision& p = c.layout.precision;
  if (p.kind == WeightKind::kInt) {
    float scale = p.scale;
    if (p.row_scaled) {
      __builtin_memcpy(&scale, row, sizeof(float));
      row += sizeof(float);
    }
    unpack_codes(p.bits, row, dim, scale, out);
    return;
  }
  const auto halves = [&](auto convert) __attribute__((always_inline)) {
    for (uint32_t i = 0; i < dim; ++i) {
      uint16_t h;
      __builtin_memcpy(&h, row + 2 * i, 2);
      out[i] = convert(h);
    }
  };
  if (p.kind == WeightKind::kFp16) halves([](uint32_t h) __attribute__((always_inline)) { return from_fp16(h); });
  else halves([](uint32_t h) __attribute__((always_inline)) { return from_bf16(h); });
}

void decode(const Codec& c, const Rows& rows, const uint32_t* slots, size_t n, size_t all, bool state, float* floats,
            size_t stride) {
  const size_t weight_bytes = c.layout.weight_bytes(), state_bytes = c.layout.tail_words() * sizeof(float);
  for (size_t r = 0; r < n; ++r, floats += stride) {
    if (r + kAheadIds < all) prefetch<0>(rows.base + slots[r + kAheadIds] * rows.stride, rows.stride);
    const uint8_t* row = rows.base + slots[r] * rows.stride;
    decode_weights(c, row, floats);
    if (state) __builtin_memcpy(floats + c.layout.dim, row + weight_bytes, state_bytes);
  }
}

// Scale of a row: the largest weight gets the largest code. NaN if a weight is NaN.
TC_INLINE float row_scale(const float* x, uint32_t dim, float most) {
  uint32_t largest = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    const uint32_t size = bits_as<uint32_t>(x[i]) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  return bits_as<float>(largest > 0x7f800000 ? 0x7fc00000 : largest) / most;
}

template <bool kStochastic>
TC_INLINE void quantize(const float* x, uint32_t dim, float scale, float least, float most, uint64_t stream,
                        int32_t* codes) {
  for (uint32_t i = 0; i < dim; ++i) {
    float q = x[i] / scale;
    q = q == q ? q : 0;
    q = q < least ? least : q;
    q = q > most ? most : q;
    auto floor = static_cast<int32_t>(q);
    floor -= q < static_cast<float>(floor);
    const float rest = q - static_cast<float>(floor);
    bool up;
    if constexpr (kStochastic) up = static_cast<float>(static_cast<int32_t>(random24(stream, i))) < rest * 0x1p24f;
    else up = rest >= 0.5f;
    codes[i] = floor + up;
  }
}

TC_INLINE int64_t scale_gradient(const float* x, uint32_t dim, float scale, float least, float most,
                                 const int32_t* codes, const float* sums, float grad_scale) {
  int64_t total = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    const float q = x[i] / scale, g = sums[i] * grad_scale;
    const float code = q < least ? least : q > most ? most : static_cast<float>(codes[i]);
    const float error = code - q;
    float term = (g * g) * (error * (q < least || q > most ? code : error));
    term = term == term ? term : 0;
    term = term < -0x1p-8f ? -0x1p-8f : term > 0x1p-8f ? 0x1p-8f : term;
    total += static_cast<int64_t>(term * 0x1p44f);
  }
  return total;
}

template <bool kStochastic>
TC_INLINE void encode_weights(const Codec& c, const float* x, uint64_t stream, int32_t* codes, uint8_t* row) {
  const uint32_t dim = c.layout.dim;
  const Precision& p = c.layout.precision;
  // Bits after the last code are zero.
  __builtin_memset(row + c.layout.weight_bytes() - sizeof(uint32_t), 0, sizeof(uint32_t));
  if (p.kind == WeightKind::kInt) {
    float scale = p.scale;
    if (p.row_scaled) {
      scale = row_scale(x, dim, c.most());
      __builtin_memcpy(row, &scale, sizeof(float));
      row += sizeof(float);
    }
    quantize<kStochastic>(x, dim, scale, c.least(), c.most(), stream, codes);
  } else if (p.kind == WeightKind::kFp16) {
    for (uint32_t i = 0; i < dim; ++i) codes[i] = to_fp16<kStochastic>(x[i], kStochastic ? random24(stream, i) : 0);
  } else {
    for (uint32_t i = 0; i < dim; ++i) codes[i] = to_bf16<kStochastic>(x[i], kStochastic ? random24(stream, i) : 0);
  }
  pack_codes(p.bits, codes, dim, row);
}

void encode(const Codec& c, const Rows& rows, const uint32_t* slots, size_t n, const uint64_t* streams,
            const float* floats, size_t stride, int32_t* codes, ScaleGradient* gradient) {
  const uint32_t dim = c.layout.dim;
  const size_t weight_bytes = c.layout.weight_bytes(), state_bytes = c.layout.tail_words() * sizeof(float);
  for (size_t r = 0; r < n; ++r, floats += stride) {
    uint8_t* row = rows.base + slots[r] * rows.stride;
    if (streams) encode_weights<true>(c, floats, streams[r], codes, row);
    else encode_weights<false>(c, floats, 0, codes, row);
    if (gradient) {
      gradient->total += scale_gradient(floats, dim, c.layout.precision.scale, c.least(), c.most(), codes,
                                        gradient->sums + r * dim, gradient->grad_scale);
    }
    __builtin_memcpy(row + weight_bytes, floats + dim, state_bytes);
  }
}

}  // namespace
