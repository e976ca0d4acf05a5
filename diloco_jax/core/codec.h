/* How tiles are encoded, as in core/codecs.py, for merge.c. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && !defined(__FMA__)
#error "this processor has no fused multiply-add"
#endif

#define INLINE static inline __attribute__((always_inline))
#define CHUNK 2048 /* Elements in hand at a time: whole blocks of every codec. */
#define BLOCK8 256 /* Elements that share a scale: int8, int4. */
#define BLOCK4 32

enum { F32, BF16, INT8, INT4 };
enum { STORE, ADD };

/* ---- small parts ------------------------------------------------------------------ */

/* Make subnormal results and operands zeros, as XLA does; return what to restore. */
INLINE uint64_t zero_subnormals(void) {
#if defined(__SSE2__)
  unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  return before;
#elif defined(__aarch64__)
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" ::"r"(before | (1u << 24)));
  return before;
#else
  return 0;
#endif
}

INLINE void restore(uint64_t before) {
#if defined(__SSE2__)
  _mm_setcsr((unsigned)before);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" ::"r"(before));
#else
  (void)before;
#endif
}

INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE float flushed(float x) {
  uint32_t bits = bits_of(x);
  return float_of((bits & 0x7fffffffu) < 0x00800000u ? 0 : bits);
}

INLINE float load_f32(const uint8_t *at) {
  float x;
  memcpy(&x, at, 4);
  return x;
}

INLINE float load_bf16(const uint8_t *at) {
  uint16_t half;
  memcpy(&half, at, 2);
  return float_of((uint32_t)half << 16);
}

/* Bits of x rounded to the nearest bf16; a NaN stays one. */
INLINE uint32_t rounded(uint32_t bits) {
  uint32_t near = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  uint32_t nan = (bits & 0xffff0000u) | 0x00400000u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : near;
}

/* ---- decode ----------------------------------------------------------------------- */

INLINE int64_t tile_bytes(int codec, int64_t n) {
  switch (codec) {
  case F32: return 4 * n;
  case BF16: return 2 * n;
  case INT8: return n + 2 * ((n + BLOCK8 - 1) / BLOCK8);
  default: return (n + 1) / 2 + 2 * ((n + BLOCK4 - 1) / BLOCK4);
  }
}

INLINE void put(int op, float factor, float value, float *to) {
  *to = op == ADD ? __builtin_fmaf(factor, value, *to) : value;
}

/* Decode `count` elements of one block of int4, all low or all high nibbles. */
INLINE void put_nibbles(int op, float factor, const uint8_t *from, int shift,
                        float scale, int64_t count, float *to) {
  for (int64_t i = 0; i < count; i++) {
    int quantized = (int)(((from[i] >> shift) & 0xf) ^ 8) - 8;
    put(op, factor, (float)quantized * scale, to + i);
  }
}

/* Decode elements [start, start + count) of a tile; start is a multiple of CHUNK. STORE
them, or ADD their product with `factor` to what is there. */
INLINE void decode(int codec, int op, const uint8_t *tile, int64_t n, int64_t start,
                   int64_t count, float factor, float *restrict to) {
  if (codec == F32) {
    for (int64_t i = 0; i < count; i++)
      put(op, factor, flushed(load_f32(tile + 4 * (start + i))), to + i);
  } else if (codec == BF16) {
    for (int64_t i = 0; i < count; i++)
      put(op, factor, flushed(load_bf16(tile + 2 * (start + i))), to + i);
  } else if (codec == INT8) {
    const int8_t *from = (const int8_t *)tile + start;
    const uint8_t *scales = tile + n + 2 * (start / BLOCK8);
    int64_t i = 0;
    for (; i + BLOCK8 <= count; i += BLOCK8, scales += 2) {
      float scale = flushed(load_bf16(scales));
      for (int64_t j = 0; j < BLOCK8; j++)
        put(op, factor, (float)from[i + j] * scale, to + i + j);
    }
    if (i < count) {
      float scale = flushed(load_bf16(scales));
      for (; i < count; i++) put(op, factor, (float)from[i] * scale, to + i);
    }
  } else {
    int64_t half = (n + 1) / 2;
    const uint8_t *scales = tile + half + 2 * (start / BLOCK4);
    for (int64_t i = 0; i < count; i += BLOCK4, scales += 2) {
      float scale = flushed(load_bf16(scales));
      int64_t at = start + i, size = count - i < BLOCK4 ? count - i : BLOCK4;
      if (size == BLOCK4 && at + BLOCK4 <= half) {
        put_nibbles(op, factor, tile + at, 0, scale, BLOCK4, to + i);
      } else if (size == BLOCK4 && at >= half) {
        put_nibbles(op, factor, tile + at - half, 4, scale, BLOCK4, to + i);
      } else {
        int64_t low = at >= half ? 0 : half - at < size ? half - at : size;
        put_nibbles(op, factor, tile + at, 0, scale, low, to + i);
        put_nibbles(op, factor, tile + at + low - half, 4, scale, size - low,
                    to + i + low);
      }
    }
  }
}

/* ---- encode ----------------------------------------------------------------------- */

/* Encode one block of `count` changes into int8, and return its scale; 0 or a NaN goes
with zeros. */
INLINE uint32_t quantize(int peak, const float *restrict change, int64_t count,
                         int8_t *restrict to) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t size = bits_of(change[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  if (largest >= 0x7f800000u) {
    memset(to, 0, count);
    return 0x7fc00000u;
  }
  uint32_t scale = rounded(bits_of(flushed(float_of(largest) * (1.0f / peak))));
  if (scale == 0) {
    memset(to, 0, count);
    return 0;
  }
  float by = 1.0f / float_of(scale), most = (float)peak;
  for (int64_t i = 0; i < count; i++) {
    float near = __builtin_rintf(change[i] * by);
    near = near > most ? most : near;
    near = near < -most ? -most : near;
    to[i] = (int8_t)near;
  }
  return scale;
}

INLINE void publish_blocks(int block, int peak, const float *change, int64_t start,
                           int64_t count, int8_t *quantized, uint8_t *scales,
                           const float *anchor, float *moved) {
  for (int64_t i = 0; i < count; i += block) {
    int64_t size = count - i < block ? count - i : block;
    int8_t *own = quantized + start + i;
    uint32_t scale = size == block ? quantize(peak, change + i, block, own)
                                   : quantize(peak, change + i, size, own);
    uint16_t half = (uint16_t)(scale >> 16);
    memcpy(scales + 2 * ((start + i) / block), &half, 2);
    float by = float_of(scale);
    for (int64_t j = 0; j < size; j++)
      moved[i + j] = flushed(__builtin_fmaf((float)own[j], by, anchor[i + j]));
  }
}
