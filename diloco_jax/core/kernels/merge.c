/* The merge's passes over encoded deltas and tiles: the route "native".

Each function does what the route "xla" does, operation by operation, in the same order:
a product that is added is fused (fma), other operations round by themselves, and values
below the smallest normal f32 are zeros. So vectors and threads change no bit. Compile
with -ffp-contract=off and without -ffast-math.

All arrays of a piece lie in the order of its tiles. `n` is the number of elements of a
tile, `tiles` the number of tiles in this call. Each function returns 0, or 1 if there
is no memory. Codecs and steps are numbered as in library.py. */

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define CHUNK 2048   /* Elements in hand at a time: whole blocks of every codec. */
#define BLOCK8 256   /* Elements that share a scale: int8, int4. */
#define BLOCK4 32
#define FOLDS 3      /* Halvings of a tile's squares that are done at once. */

enum { F32, BF16, INT8, INT4 };
enum { KEEP, FLUSH, SGD, NESTEROV, GUARDED_NESTEROV };
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

/* ---- squares ---------------------------------------------------------------------- */

/* Elements that are left when a tile is halved as often as it can be. */
INLINE int64_t odd_part(int64_t n) {
  while (n % 2 == 0) n /= 2;
  return n;
}

/* Halve f64[2 * half] in place: one half is added to the other. */
INLINE void fold(double *restrict sums, int64_t half) {
  for (int64_t i = 0; i < half; i++) sums[i] += sums[i + half];
}

/* Squares of a tile, one half added to the other again and again, into f64[odd_part].
work: f64[max(n / 2^FOLDS, odd_part)]. */
INLINE void halve_squares(const float *restrict x, int64_t n, double *restrict work,
                          double *out) {
  int64_t size = n, odd = odd_part(n);
  if (n % (1 << FOLDS) == 0) {
    size = n >> FOLDS;
    for (int64_t i = 0; i < size; i++) {
      double s[1 << FOLDS];
      for (int p = 0; p < 1 << FOLDS; p++) {
        double value = (double)x[i + p * size];
        s[p] = value * value;
      }
      work[i] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    }
  } else {
    while (size > odd) size /= 2;
    int64_t parts = n / size; /* 1, 2 or 4. */
    for (int64_t i = 0; i < size; i++) {
      double s[4] = {0, 0, 0, 0};
      for (int64_t p = 0; p < parts; p++) {
        double value = (double)x[i + p * size];
        s[p] = value * value;
      }
      work[i] = parts == 4 ? (s[0] + s[2]) + (s[1] + s[3])
                           : (parts == 2 ? s[0] + s[1] : s[0]);
    }
  }
  for (; size > odd; size /= 2) fold(work, size / 2);
  memcpy(out, work, 8 * odd);
}

INLINE double *square_work(int64_t n) {
  int64_t odd = odd_part(n), most = n >> FOLDS;
  return malloc(8 * (most > odd ? most : odd));
}

INLINE int squares_of(int codec, int64_t tiles, int64_t n, const uint8_t *encoded,
                      double *out) {
  int64_t bytes = tile_bytes(codec, n), odd = odd_part(n);
  float *values = malloc(4 * n);
  double *work = square_work(n);
  if (values && work) {
    for (int64_t t = 0; t < tiles; t++) {
      decode(codec, STORE, encoded + t * bytes, n, 0, n, 1, values);
      halve_squares(values, n, work, out + t * odd);
    }
  }
  int failed = !values || !work;
  free(values);
  free(work);
  return failed;
}

/* Squares of each tile of an encoded delta: f64[tiles, odd_part(n)]. */
int merge_squares(int codec, int64_t tiles, int64_t n, const uint8_t *encoded,
                  double *out) {
  uint64_t before = zero_subnormals();
  int failed = 1;
  switch (codec) {
  case F32: failed = squares_of(F32, tiles, n, encoded, out); break;
  case BF16: failed = squares_of(BF16, tiles, n, encoded, out); break;
  case INT8: failed = squares_of(INT8, tiles, n, encoded, out); break;
  case INT4: failed = squares_of(INT4, tiles, n, encoded, out); break;
  }
  restore(before);
  return failed;
}

/* ---- sum -------------------------------------------------------------------------- */

INLINE int sum_of(int codec, int64_t deltas, int64_t tiles, int64_t n,
                  const uint8_t *const *encoded, const float *factors, float *total,
                  double *squares) {
  int64_t bytes = tile_bytes(codec, n), odd = odd_part(n);
  double *work = square_work(n);
  if (!work) return 1;
  for (int64_t t = 0; t < tiles; t++) {
    float *out = total + t * n;
    for (int64_t start = 0; start < n; start += CHUNK) {
      int64_t count = n - start < CHUNK ? n - start : CHUNK;
      float sum[CHUNK];
      memset(sum, 0, sizeof sum);
      for (int64_t m = 0; m < deltas; m++) {
        const uint8_t *tile = encoded[m] + t * bytes;
        if (count == CHUNK)
          decode(codec, ADD, tile, n, start, CHUNK, factors[m], sum);
        else
          decode(codec, ADD, tile, n, start, count, factors[m], sum);
      }
      memcpy(out + start, sum, 4 * count);
    }
    halve_squares(out, n, work, squares + t * odd);
  }
  free(work);
  return 0;
}

/* Sum of the deltas, each times its factor, in their order, and the squares of it:
f32[tiles, n], f64[tiles, odd_part(n)]. */
int merge_sum(int codec, int64_t deltas, int64_t tiles, int64_t n,
              const uint8_t *const *encoded, const float *factors, float *total,
              double *squares) {
  uint64_t before = zero_subnormals();
  int failed = 1;
#define SUM(CODEC)                                                                     \
  case CODEC:                                                                          \
    failed = sum_of(CODEC, deltas, tiles, n, encoded, factors, total, squares);        \
    break;
  switch (codec) { SUM(F32) SUM(BF16) SUM(INT8) SUM(INT4) }
  restore(before);
  return failed;
}

/* ---- step and publish ------------------------------------------------------------- */

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

typedef struct {
  float factor, guard, momentum, rate;
} Step;

/* Take the outer step of `count` elements. total and theta may be the same memory. */
INLINE void take_step(int kind, Step step, int64_t count, const float *total,
                      const float *old, const float *trace, float *theta,
                      float *new_trace) {
  for (int64_t i = 0; i < count; i++) {
    float delta = total[i] * step.factor;
    if (kind == FLUSH) {
      theta[i] = old[i] - delta;
    } else {
      float update = delta * step.guard;
      if (kind == NESTEROV) {
        new_trace[i] = __builtin_fmaf(step.momentum, trace[i], delta);
        update = __builtin_fmaf(step.momentum, new_trace[i], delta);
      } else if (kind == GUARDED_NESTEROV) {
        new_trace[i] = __builtin_fmaf(delta, step.guard, step.momentum * trace[i]);
        update = __builtin_fmaf(delta, step.guard, step.momentum * new_trace[i]);
      }
      theta[i] = __builtin_fmaf(-step.rate, update, old[i]);
    }
  }
}

INLINE int finish_of(int codec, int kind, Step step, int64_t tiles, int64_t n,
                     const float *old, const float *trace, const float *anchor,
                     float *theta, float *new_trace, float *new_anchor,
                     uint8_t *encoded) {
  int64_t bytes = tile_bytes(codec, n), half = (n + 1) / 2;
  int traced = kind == NESTEROV || kind == GUARDED_NESTEROV;
  int8_t *nibbles = codec == INT4 ? calloc(2 * half, 1) : NULL;
  if (codec == INT4 && !nibbles) return 1;
  for (int64_t t = 0; t < tiles; t++, encoded += bytes) {
    for (int64_t start = 0; start < n; start += CHUNK) {
      int64_t count = n - start < CHUNK ? n - start : CHUNK, at = t * n + start;
      float change[CHUNK];
      if (kind != KEEP)
        take_step(kind, step, count, theta + at, old + at,
                  traced ? trace + at : NULL, theta + at,
                  traced ? new_trace + at : NULL);
      for (int64_t i = 0; i < count; i++)
        change[i] = flushed(theta[at + i] - anchor[at + i]);
      if (codec == INT8) {
        publish_blocks(BLOCK8, 127, change, start, count, (int8_t *)encoded,
                       encoded + n, anchor + at, new_anchor + at);
      } else if (codec == INT4) {
        publish_blocks(BLOCK4, 7, change, start, count, nibbles, encoded + half,
                       anchor + at, new_anchor + at);
      } else {
        if (codec == BF16) {
          for (int64_t i = 0; i < count; i++) {
            uint32_t near = rounded(bits_of(change[i]));
            uint16_t upper = (uint16_t)(near >> 16);
            memcpy(encoded + 2 * (start + i), &upper, 2);
            change[i] = float_of(near);
          }
        } else {
          memcpy(encoded + 4 * start, change, 4 * count);
        }
        for (int64_t i = 0; i < count; i++)
          new_anchor[at + i] = flushed(anchor[at + i] + change[i]);
      }
    }
    if (codec == INT4)
      for (int64_t i = 0; i < half; i++)
        encoded[i] = (uint8_t)((nibbles[i] & 0xf) | (nibbles[half + i] << 4));
  }
  free(nibbles);
  return 0;
}

/* Take the outer step from the sum that lies in `theta`, and encode the publish. KEEP:
theta is final. f32[tiles, n] each, uint8[tiles, tile_bytes]; traces: NESTEROV alone. */
int merge_finish(int codec, int kind, float factor, float guard, float momentum,
                 float rate, int64_t tiles, int64_t n, const float *old,
                 const float *trace, const float *anchor, float *theta,
                 float *new_trace, float *new_anchor, uint8_t *encoded) {
  uint64_t before = zero_subnormals();
  Step step = {factor, guard, momentum, rate};
  int failed = 1;
#define FINISH(CODEC, KIND)                                                            \
  if (codec == CODEC && kind == KIND)                                                  \
    failed = finish_of(CODEC, KIND, step, tiles, n, old, trace, anchor, theta,         \
                       new_trace, new_anchor, encoded);
#define FINISH_ALL(CODEC)                                                              \
  FINISH(CODEC, KEEP) FINISH(CODEC, FLUSH) FINISH(CODEC, SGD)                         \
  FINISH(CODEC, NESTEROV) FINISH(CODEC, GUARDED_NESTEROV)
  FINISH_ALL(F32) FINISH_ALL(BF16) FINISH_ALL(INT8) FINISH_ALL(INT4)
  restore(before);
  return failed;
}
