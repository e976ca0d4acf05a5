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
#define BLOCK8 256 /* Elements that share a scale: int8; int4 and int2. */
#define BLOCK4 32

enum { F32, BF16, INT8, INT4, INT2 };
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

/* Bits of an integer of int8, int4 or int2, and elements that share its scale. */
INLINE int bits_of_codec(int codec) { return codec == INT8 ? 8 : codec == INT4 ? 4 : 2; }

INLINE int64_t block_of(int bits) { return bits == 8 ? BLOCK8 : BLOCK4; }

/* Bytes of a tile's integers: element i is integer i / width_of of byte i % width_of. */
INLINE int64_t width_of(int bits, int64_t n) { return (n * bits + 7) / 8; }

INLINE int64_t tile_bytes(int codec, int64_t n) {
  if (codec == F32) return 4 * n;
  if (codec == BF16) return 2 * n;
  int bits = bits_of_codec(codec);
  int64_t block = block_of(bits);
  return width_of(bits, n) + 2 * ((n + block - 1) / block);
}

INLINE void put(int op, float factor, float value, float *to) {
  *to = op == ADD ? __builtin_fmaf(factor, value, *to) : value;
}

/* Decode `count` elements of one block, all from the same bits of their bytes. */
INLINE void put_integers(int bits, int op, float factor, const uint8_t *from, int shift,
                         float scale, int64_t count, float *to) {
  int sign = 1 << (bits - 1);
  for (int64_t i = 0; i < count; i++) {
    int quantized = (int8_t)from[i];
    if (bits < 8) quantized = (((from[i] >> shift) & (2 * sign - 1)) ^ sign) - sign;
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
  } else {
    int bits = bits_of_codec(codec);
    int64_t block = block_of(bits), width = width_of(bits, n), end = start + count;
    for (int p = 0; p < 8 / bits; p++) {
      int64_t low = p * width, high = low + width < end ? low + width : end;
      for (int64_t at = low > start ? low : start, here; at < high; at += here) {
        float scale = flushed(load_bf16(tile + width + 2 * (at / block)));
        here = block - at % block < high - at ? block - at % block : high - at;
        if (here == block)
          put_integers(bits, op, factor, tile + at - low, p * bits, scale, block,
                       to + at - start);
        else
          put_integers(bits, op, factor, tile + at - low, p * bits, scale, here,
                       to + at - start);
      }
    }
  }
}

/* ---- encode ----------------------------------------------------------------------- */

/* Encode one block of `count` changes into int8, and return its scale; 0 or a NaN goes
with zeros. */
INLINE uint32_t quantize(int bits, const float *restrict change, int64_t count,
                         int8_t *restrict to) {
  float most = (float)((1 << (bits - 1)) - 1), least = bits == 2 ? -2 : -most;
  uint32_t largest = 0, below = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t size = bits_of(change[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  if (largest >= 0x7f800000u) {
    memset(to, 0, count);
    return 0x7fc00000u;
  }
  float by = float_of(largest) * (1.0f / most);
  if (bits == 2) {
    for (int64_t i = 0; i < count; i++) below |= change[i] == -float_of(largest);
    by = float_of(largest) * (below ? 0.5f : -0.5f);
  }
  uint32_t scale = rounded(bits_of(flushed(by)));
  if (scale == 0) {
    memset(to, 0, count);
    return 0;
  }
  by = 1.0f / float_of(scale);
  for (int64_t i = 0; i < count; i++) {
    float near = __builtin_rintf(change[i] * by);
    near = near > most ? most : near;
    near = near < least ? least : near;
    to[i] = (int8_t)near;
  }
  return scale;
}

INLINE void publish_blocks(int bits, const float *change, int64_t start,
                           int64_t count, int8_t *quantized, uint8_t *scales,
                           const float *anchor, float *moved) {
  int64_t block = block_of(bits);
  for (int64_t i = 0; i < count; i += block) {
    int64_t size = count - i < block ? count - i : block;
    int8_t *own = quantized + start + i;
    uint32_t scale = size == block ? quantize(bits, change + i, block, own)
                                   : quantize(bits, change + i, size, own);
    uint16_t half = (uint16_t)(scale >> 16);
    memcpy(scales + 2 * ((start + i) / block), &half, 2);
    float by = float_of(scale);
    for (int64_t j = 0; j < size; j++)
      moved[i + j] = flushed(__builtin_fmaf((float)own[j], by, anchor[i + j]));
  }
}
