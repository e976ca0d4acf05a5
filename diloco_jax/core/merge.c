/* The merge's passes over encoded deltas and tiles: the route "native".

Each function does what the route "xla" does, operation by operation, in the same order:
a product that is added is fused (fma), other operations round by themselves, and values
below the smallest normal f32 are zeros. So vectors and threads change no bit. Compile
with -ffp-contract=off and without -ffast-math.

All arrays of a piece lie in the order of its tiles. `n` is the number of elements of a
tile, `tiles` the number of tiles in this call. Each function returns 0, or 1 if there
is no memory. Codecs and steps are numbered as in tiles.py. */

#include "codec.h"

#define FOLDS 3 /* Halvings of a tile's squares that are done at once. */
#define RUN 16384 /* MOST_ELEMENTS of tiles.py: larger tiles are squared in runs. */

enum { KEEP, FLUSH, SGD, NESTEROV, GUARDED_NESTEROV };

/* ---- squares ---------------------------------------------------------------------- */

/* Elements that are left when a tile is halved as often as it can be. */
INLINE int64_t odd_part(int64_t n) {
  while (n % 2 == 0) n /= 2;
  return n;
}

/* Elements whose squares are halved at a time: those of a tile, or of a run of it. */
INLINE int64_t run_of(int64_t n) { return n < RUN ? n : RUN; }

/* Numbers that are left of the squares of a tile. */
INLINE int64_t parts_of(int64_t n) {
  return n > RUN ? (n + RUN - 1) / RUN : odd_part(n);
}

/* Halve f64[2 * half] in place: one half is added to the other. */
INLINE void fold(double *restrict sums, int64_t half) {
  for (int64_t i = 0; i < half; i++) sums[i] += sums[i + half];
}

/* Squares of a run, one half added to the other again and again, into f64[odd_part].
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
  int64_t bytes = tile_bytes(codec, n), run = run_of(n);
  float *values = malloc(4 * run);
  double *work = square_work(run);
  if (values && work) {
    for (int64_t t = 0; t < tiles; t++, out += parts_of(n)) {
      double *to = out;
      for (int64_t start = 0; start < n; start += run, to++) {
        int64_t count = n - start < run ? n - start : run;
        decode(codec, STORE, encoded + t * bytes, n, start, count, 1, values);
        memset(values + count, 0, 4 * (run - count));
        halve_squares(values, run, work, to);
      }
    }
  }
  int failed = !values || !work;
  free(values);
  free(work);
  return failed;
}

/* Squares of each tile of an encoded delta: f64[tiles, parts_of(n)]. */
int merge_squares(int codec, int64_t tiles, int64_t n, const uint8_t *encoded,
                  double *out) {
  uint64_t before = zero_subnormals();
  int failed = 1;
#define SQUARES(CODEC)                                                                 \
  case CODEC:                                                                          \
    failed = squares_of(CODEC, tiles, n, encoded, out);                                \
    break;
  switch (codec) { SQUARES(F32) SQUARES(BF16) SQUARES(INT8) SQUARES(INT4) SQUARES(INT2) }
  restore(before);
  return failed;
}

/* ---- rows of the first axis ------------------------------------------------------- */

/* Which rows tiles have: tile `first` is the first of this call, `across` of them lie
beside each other, and each has `own` rows, one after the other. */
typedef struct {
  int64_t first, across, own;
} Rows;

/* The first row of tile t of this call. */
INLINE int64_t first_row(Rows rows, int64_t t) {
  return (rows.first + t) / rows.across * rows.own;
}

/* The end, in a chunk, of the row that has its element i; `length` elements a row. */
INLINE int64_t row_end(int64_t start, int64_t i, int64_t length, int64_t count) {
  int64_t end = ((start + i) / length + 1) * length - start;
  return end < count ? end : count;
}

/* Add a chunk of a tile, each row times its own factor. */
INLINE void add_rows(const float *restrict value, const float *factors, int64_t start,
                     int64_t count, int64_t length, float *restrict sum) {
  for (int64_t i = 0, end; i < count; i = end) {
    float factor = factors[(start + i) / length];
    end = row_end(start, i, length, count);
    for (int64_t j = i; j < end; j++) sum[j] = __builtin_fmaf(factor, value[j], sum[j]);
  }
}

/* Put the values from before a step back where nobody used a row of a chunk. */
INLINE void keep_rows(const uint8_t *unused, int64_t start, int64_t count,
                      int64_t length, const float *old, const float *trace,
                      float *theta, float *new_trace) {
  for (int64_t i = 0, end; i < count; i = end) {
    end = row_end(start, i, length, count);
    if (!unused[(start + i) / length]) continue;
    memcpy(theta + i, old + i, 4 * (end - i));
    if (trace) memcpy(new_trace + i, trace + i, 4 * (end - i));
  }
}

/* ---- sum -------------------------------------------------------------------------- */

/* Ask for the integers or values of a chunk, which is needed once the same chunk of all
deltas has been added: a processor does not follow so many streams by itself. */
INLINE void read_ahead(int codec, const uint8_t *tile, int64_t start) {
  int64_t width = codec == F32 ? 4 : codec == BF16 ? 2 : 1;
  for (int64_t i = 0; i < CHUNK * width; i += 64)
    __builtin_prefetch(tile + start * width + i);
}

INLINE int sum_of(int codec, int64_t deltas, int64_t tiles, int64_t n, int64_t apart,
                  Rows rows, const uint8_t *const *encoded, const float *factors,
                  float *total, double *squares) {
  int64_t bytes = tile_bytes(codec, n), run = run_of(n);
  double *work = square_work(run);
  float *end = malloc(4 * run);
  if (!work || !end) {
    free(work);
    free(end);
    return 1;
  }
  for (int64_t t = 0; t < tiles; t++, squares += parts_of(n)) {
    float *out = total + t * n;
    double *to = squares;
    const float *here = factors + first_row(rows, t);
    for (int64_t start = 0; start < n; start += CHUNK) {
      int64_t count = n - start < CHUNK ? n - start : CHUNK;
      float sum[CHUNK];
      memset(sum, 0, sizeof sum);
      for (int64_t m = 0; m < deltas; m++) {
        const uint8_t *tile = encoded[m] + t * bytes;
        read_ahead(codec, tile, start + CHUNK);
        if (rows.own > 1) {
          float value[CHUNK];
          decode(codec, STORE, tile, n, start, count, 1, value);
          add_rows(value, here + m * apart, start, count, n / rows.own, sum);
        } else if (count == CHUNK) {
          decode(codec, ADD, tile, n, start, CHUNK, here[m * apart], sum);
        } else {
          decode(codec, ADD, tile, n, start, count, here[m * apart], sum);
        }
      }
      memcpy(out + start, sum, 4 * count);
    }
    for (int64_t start = 0; start < n; start += run, to++) {
      int64_t count = n - start < run ? n - start : run;
      const float *from = out + start;
      if (count < run) {
        memcpy(end, from, 4 * count);
        memset(end + count, 0, 4 * (run - count));
        from = end;
      }
      halve_squares(from, run, work, to);
    }
  }
  free(work);
  free(end);
  return 0;
}

/* Sum of the deltas, each times its factor, in their order, and the squares of it:
f32[tiles, n], f64[tiles, parts_of(n)]. A delta has `apart` factors, one a row. */
int merge_sum(int codec, int64_t deltas, int64_t tiles, int64_t n, int64_t apart,
              int64_t first, int64_t across, int64_t own,
              const uint8_t *const *encoded, const float *factors, float *total,
              double *squares) {
  uint64_t before = zero_subnormals();
  Rows rows = {first, across, own};
  int failed = 1;
#define SUM(CODEC)                                                                     \
  case CODEC:                                                                          \
    failed = sum_of(CODEC, deltas, tiles, n, apart, rows, encoded, factors, total,     \
                    squares);                                                          \
    break;
  switch (codec) { SUM(F32) SUM(BF16) SUM(INT8) SUM(INT4) SUM(INT2) }
  restore(before);
  return failed;
}

/* ---- step and publish ------------------------------------------------------------- */

typedef struct {
  float factor, guard, momentum, rate;
} Step;

/* The same for a publish: 1 / rate, momentum^2 and 1 / (1 + momentum), each rounded once.
*/
typedef struct {
  float guard, momentum, by, squared, part;
} Inferred;

/* Take the outer step of `count` elements. total and theta may be the same memory. */
INLINE void step_of(int kind, Step step, int64_t count, const float *total,
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

static void take_step(int kind, Step step, int64_t count, const float *total,
                      const float *old, const float *trace, float *theta,
                      float *new_trace) {
#define TAKE(KIND)                                                                     \
  case KIND:                                                                           \
    step_of(KIND, step, count, total, old, trace, theta, new_trace);                   \
    break;
  switch (kind) { TAKE(FLUSH) TAKE(SGD) TAKE(NESTEROV) TAKE(GUARDED_NESTEROV) }
}

INLINE int finish_of(int codec, int kind, Step step, int64_t tiles, int64_t n,
                     Rows rows, const uint8_t *unused, const float *old,
                     const float *trace, const float *anchor, float *theta,
                     float *new_trace, float *new_anchor, uint8_t *encoded) {
  int bits = bits_of_codec(codec), planes = 8 / bits;
  int64_t bytes = tile_bytes(codec, n), width = width_of(bits, n);
  int traced = kind == NESTEROV || kind == GUARDED_NESTEROV;
  int packed = codec == INT4 || codec == INT2;
  int8_t *integers = packed ? calloc(planes * width, 1) : NULL;
  if (packed && !integers) return 1;
  for (int64_t t = 0; t < tiles; t++, encoded += bytes) {
    for (int64_t start = 0; start < n; start += CHUNK) {
      int64_t count = n - start < CHUNK ? n - start : CHUNK, at = t * n + start;
      float change[CHUNK];
      if (kind != KEEP)
        take_step(kind, step, count, theta + at, old + at,
                  traced ? trace + at : NULL, theta + at,
                  traced ? new_trace + at : NULL);
      if (unused && kind != KEEP)
        keep_rows(unused + first_row(rows, t), start, count, n / rows.own, old + at,
                  traced ? trace + at : NULL, theta + at,
                  traced ? new_trace + at : NULL);
      for (int64_t i = 0; i < count; i++)
        change[i] = flushed(theta[at + i] - anchor[at + i]);
      if (codec == INT8 || packed) {
        publish_blocks(bits, change, start, count,
                       packed ? integers : (int8_t *)encoded, encoded + width,
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
    for (int64_t i = 0; packed && i < width; i++) {
      int octet = 0;
      for (int p = 0; p < planes; p++)
        octet |= (integers[p * width + i] & ((1 << bits) - 1)) << (p * bits);
      encoded[i] = (uint8_t)octet;
    }
  }
  free(integers);
  return 0;
}

/* Take the outer step from the sum that lies in `theta`, and encode the publish. KEEP:
theta is final. f32[tiles, n] each, uint8[tiles, tile_bytes]; traces: NESTEROV alone.
unused: by row whether it stays as it was; may be NULL. */
int merge_finish(int codec, int kind, float factor, float guard, float momentum,
                 float rate, int64_t tiles, int64_t n, int64_t first, int64_t across,
                 int64_t own, const uint8_t *unused, const float *old,
                 const float *trace, const float *anchor, float *theta,
                 float *new_trace, float *new_anchor, uint8_t *encoded) {
  uint64_t before = zero_subnormals();
  Step step = {factor, guard, momentum, rate};
  Rows rows = {first, across, own};
  int failed = 1;
#define FINISH(CODEC)                                                                  \
  case CODEC:                                                                          \
    failed = finish_of(CODEC, kind, step, tiles, n, rows, unused, old, trace, anchor,  \
                       theta, new_trace, new_anchor, encoded);                         \
    break;
  switch (codec) { FINISH(F32) FINISH(BF16) FINISH(INT8) FINISH(INT4) FINISH(INT2) }
  restore(before);
  return failed;
}

/* ---- publishes after a crash ------------------------------------------------------ */

/* Apply `count` elements of a decoded publish to the anchor, and advance the momentum by
the delta that such a step infers from it. */
INLINE void replay_of(int kind, Inferred step, int64_t count, const float *decoded,
                      const float *anchor, const float *trace, float *new_anchor,
                      float *new_trace, float *delta) {
  for (int64_t i = 0; i < count; i++) {
    float moved = flushed(anchor[i] + decoded[i]), change = moved - anchor[i];
    new_anchor[i] = moved;
    if (kind == SGD) {
      delta[i] = -(change * step.by);
    } else if (kind != FLUSH) {
      float old = step.squared * trace[i], kept = step.momentum * trace[i];
      delta[i] = __builtin_fmaf(change, -step.by, -old) * step.part;
      new_trace[i] = kind == NESTEROV
                         ? __builtin_fmaf(step.momentum, trace[i], delta[i])
                         : __builtin_fmaf(delta[i], step.guard, kept);
    }
  }
}

INLINE int replay_tiles(int codec, int kind, Inferred step, int64_t tiles, int64_t n,
                        const uint8_t *encoded, const float *anchor, const float *trace,
                        float *new_anchor, float *new_trace, double *squares) {
  int64_t bytes = tile_bytes(codec, n), run = run_of(n), odd = parts_of(n);
  float *delta = calloc(run, 4);
  double *work = square_work(run);
  if (delta && work) {
    for (int64_t t = 0; t < tiles; t++, encoded += bytes, squares += odd) {
      double *to = squares;
      for (int64_t first = 0; first < n; first += run, to++) {
        int64_t end = n - first < run ? n : first + run;
        for (int64_t start = first; start < end; start += CHUNK) {
          int64_t count = end - start < CHUNK ? end - start : CHUNK, at = t * n + start;
          float decoded[CHUNK];
          if (count == CHUNK)
            decode(codec, STORE, encoded, n, start, CHUNK, 1, decoded);
          else
            decode(codec, STORE, encoded, n, start, count, 1, decoded);
          replay_of(kind, step, count, decoded, anchor + at, trace ? trace + at : NULL,
                    new_anchor + at, new_trace ? new_trace + at : NULL,
                    delta + start - first);
        }
        memset(delta + end - first, 0, 4 * (run - (end - first)));
        halve_squares(delta, run, work, to);
      }
    }
  }
  int failed = !delta || !work;
  free(delta);
  free(work);
  return failed;
}

/* Apply a publish, uint8[tiles, tile_bytes], to f32[tiles, n] each; traces: NESTEROV
alone. The inferred delta's squares: f64[tiles, parts_of(n)], zeros of a FLUSH. */
int merge_replay(int codec, int kind, float guard, float momentum, float by,
                 float squared, float part, int64_t tiles, int64_t n,
                 const uint8_t *encoded, const float *anchor, const float *trace,
                 float *new_anchor, float *new_trace, double *squares) {
  uint64_t before = zero_subnormals();
  Inferred step = {guard, momentum, by, squared, part};
  int failed = 1;
#define REPLAY(CODEC, KIND)                                                            \
  if (codec == CODEC && kind == KIND)                                                  \
    failed = replay_tiles(CODEC, KIND, step, tiles, n, encoded, anchor, trace,         \
                          new_anchor, new_trace, squares);
#define REPLAYS(CODEC)                                                                 \
  REPLAY(CODEC, FLUSH)                                                                 \
  REPLAY(CODEC, SGD) REPLAY(CODEC, NESTEROV) REPLAY(CODEC, GUARDED_NESTEROV)
  REPLAYS(F32) REPLAYS(BF16) REPLAYS(INT8) REPLAYS(INT4) REPLAYS(INT2)
  restore(before);
  return failed;
}
