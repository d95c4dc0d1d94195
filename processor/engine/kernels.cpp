// fp32 kernels for CPUs: attention over a frozen prefix, linear layers, norms, gated activations.
//
// Each row of a result is computed by the same instructions in the same order whatever other rows
// there are and however many threads run: equal rows have equal bits in any batch. Products use
// one register tile, MR rows times NR columns, over packed panels of NR columns (Goto and van de
// Geijn, 2008); attention is one online softmax over prefix and own keys (FlashAttention,
// arXiv:2205.14135, algorithm 1), in blocks of KEY_BLOCK keys.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <omp.h>
#include <vector>

#if defined(__AVX512F__)
constexpr int VL = 16, MR = 12;  // floats of a vector; rows of a tile: as many as registers hold
#elif defined(__AVX__)
constexpr int VL = 8, MR = 6;
#else
constexpr int VL = 4, MR = 6;
#endif
constexpr int NR = 2 * VL, GROUP = 4;  // columns of a tile; strips that share what is in L1
constexpr int64_t BLOCK = KEY_BLOCK;
constexpr float LOG2E = 1.44269504088896341f, HIDDEN = -std::numeric_limits<float>::infinity();
static_assert(BLOCK % NR == 0);
typedef float vec __attribute__((vector_size(VL * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4), aligned(4)));

static inline vec load(const float* p) { return *(const vec*)p; }
static inline void store(float* p, vec v) { *(vec*)p = v; }
static inline vec splat(float x) { return x - vec{}; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 2^x to 2 ulp, and exactly 0 for -inf: below -127 the exponent bits and the mantissa are all 0.
static inline vec exp2v(vec x) {
    x = x < -127.0f ? splat(-127.0f) : x;
    vec shifted = x + 12582912.0f;  // 1.5 * 2^23: the low bits now hold round(x)
    vec f = x - (shifted - 12582912.0f);
    vec p = splat(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

// c[r][0..NR) = (FRESH ? 0 : c) + sum_k a[r*lda + k] * b[k*ldb + 0..NR)
//
// There are two of them. Compilers keep all sums in registers in the one where it is inlined into
// attention, and in the other where it is called by linear layers; each is a fifth slower in the
// other's place (measured with GCC 12 on AVX2). Both take four steps a turn, since the loop's own
// instructions count, and both add in the same order.
template <int ROWS, bool FRESH>
static inline void tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t K,
                        float* c, int64_t ldc) {
    vec lo[ROWS], hi[ROWS];
    for (int r = 0; r < ROWS; r++) {
        lo[r] = FRESH ? vec{} : load(c + r * ldc);
        hi[r] = FRESH ? vec{} : load(c + r * ldc + VL);
    }
#pragma GCC unroll 4
    for (int64_t k = 0; k < K; k++) {
        vec b0 = load(b + k * ldb), b1 = load(b + k * ldb + VL);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            vec x = splat(a[r * lda + k]);
            lo[r] += x * b0;
            hi[r] += x * b1;
        }
    }
    for (int r = 0; r < ROWS; r++) {
        store(c + r * ldc, lo[r]);
        store(c + r * ldc + VL, hi[r]);
    }
}

template <int ROWS, bool FRESH>
__attribute__((noinline)) static void called_tile(const float* a, int64_t lda, const float* b,
                                                  int64_t K, float* c, int64_t ldc) {
    vec lo[ROWS], hi[ROWS];
    const float* from[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        from[r] = a + r * lda;
        lo[r] = FRESH ? vec{} : load(c + r * ldc);
        hi[r] = FRESH ? vec{} : load(c + r * ldc + VL);
    }
    auto step = [&](int64_t k) __attribute__((always_inline)) {
        vec b0 = load(b + k * NR), b1 = load(b + k * NR + VL);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            vec x = splat(from[r][k]);
            lo[r] += x * b0;
            hi[r] += x * b1;
        }
    };
    int64_t k = 0, whole = K - K % 4;
    for (; k < whole; k += 4) {
        step(k);
        step(k + 1);
        step(k + 2);
        step(k + 3);
    }
    for (int64_t rest = 0; rest < K % 4; rest++) step(whole + rest);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        store(c + r * ldc, lo[r]);
        store(c + r * ldc + VL, hi[r]);
    }
}

template <bool FRESH, int ROWS = MR>
static inline void tile_of(int rows, const float* a, int64_t lda, const float* b, int64_t K,
                           float* c, int64_t ldc) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) called_tile<ROWS, FRESH>(a, lda, b, K, c, ldc);
        else tile_of<FRESH, ROWS - 1>(rows, a, lda, b, K, c, ldc);
    }
}

extern "C" int64_t panel_columns() { return NR; }

constexpr int64_t DEPTH = 192, ROWS = 8 * MR;  // a slice of a panel stays in L1, the rows in L2

// The rows x[0..rows) times one panel [K][NR], to [rows][NR].
static void panel_product(const float* x, int64_t rows, const float* panel, int64_t K, float* to) {
    for (int64_t k = 0; k < K; k += DEPTH)
        for (int64_t m = 0; m < rows; m += MR) {
            int count = std::min<int64_t>(MR, rows - m);
            const float *a = x + m * K + k, *b = panel + k * NR;
            int64_t depth = std::min(DEPTH, K - k);
            if (k) tile_of<false>(count, a, K, b, depth, to + m * NR, NR);
            else tile_of<true>(count, a, K, b, depth, to + m * NR, NR);
        }
}

// Calls each(m0, rows, p) for all blocks of rows and all panels, on all threads.
template <class Each>
static void all_panels(int64_t M, int64_t N, Each each) {
    if (M <= 0 || N <= 0) return;
    int64_t panels = ceil_div(N, NR), row_blocks = ceil_div(M, ROWS);
    int64_t height = ceil_div(ceil_div(M, row_blocks), MR) * MR;  // even blocks: no thin last one
    int64_t wanted = ceil_div(8 * omp_get_max_threads(), row_blocks);
    int64_t col_blocks = std::clamp<int64_t>(wanted, 1, panels);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < row_blocks; i++)
        for (int64_t j = 0; j < col_blocks; j++)
            for (int64_t p = j * panels / col_blocks; p < (j + 1) * panels / col_blocks; p++)
                each(i * height, std::min(height, M - i * height), p);
}

static inline vec silu(vec g) {
    vec x = g * -LOG2E;
    return g / (1.0f + exp2v(x > 126.0f ? splat(126.0f) : x));
}

// y[M, N] = x[M, K] w^T + bias. w: panels [ceil(N / NR)][K][NR], filled up with 0. bias: or null.
extern "C" void linear(const float* x, const float* w, const float* bias, float* y, int64_t M,
                       int64_t N, int64_t K) {
    all_panels(M, N, [=](int64_t m0, int64_t rows, int64_t p) {
        alignas(64) float product[ROWS * NR];
        panel_product(x + m0 * K, rows, w + p * K * NR, K, product);
        int64_t columns = std::min<int64_t>(NR, N - p * NR);
        for (int64_t m = 0; m < rows; m++)
            for (int64_t c = 0; c < columns; c++)
                y[(m0 + m) * N + p * NR + c] = product[m * NR + c] + (bias ? bias[p * NR + c] : 0.0f);
    });
}

// y = silu(x gate^T) * (x up^T); shapes as in `linear`
extern "C" void gated_linear(const float* x, const float* gate, const float* up, float* y,
                             int64_t M, int64_t N, int64_t K) {
    all_panels(M, N, [=](int64_t m0, int64_t rows, int64_t p) {
        alignas(64) float g[ROWS * NR], u[ROWS * NR];
        panel_product(x + m0 * K, rows, gate + p * K * NR, K, g);
        panel_product(x + m0 * K, rows, up + p * K * NR, K, u);
        for (int64_t i = 0; i < rows * NR; i += VL) store(g + i, silu(load(g + i)) * load(u + i));
        int64_t columns = std::min<int64_t>(NR, N - p * NR);
        for (int64_t m = 0; m < rows; m++)
            std::copy_n(g + m * NR, columns, y + (m0 + m) * N + p * NR);
    });
}

struct Span {  // keys and values of one head lie n * D floats behind those of the one before
    const float *k, *v;
    int64_t n;
};

struct Event {  // rows start..stop-1; results are wanted for first..stop-1; tree: or null
    int64_t first, start, stop;
    const Span* spans;
    int64_t span_count;
    const uint8_t* tree;
};

struct Attention {  // strides in floats; q [H * G heads, rows, D]; out [rows, H * G, D]
    const float *q, *k, *v;
    float* out;
    int64_t q_head, q_row, k_head, k_row, v_head, v_row;
    int64_t H, G, D, window;  // window: 0 for none
    float scale;
    const float* sinks;  // [H * G] or null
    const int64_t* positions;
    const Event* events;
    int64_t event_count;
};

namespace {

// A strip is MR (row, query head) pairs of one event and one key-value head, rows outermost. Its
// pairs never depend on the batch. Pairs beyond the last repeat it, and are not written.
struct Strip {
    const Event* event;
    int64_t index;
};

struct Task {
    int64_t head, begin, end;  // strips of events that share their spans
};

struct Scratch {
    std::vector<float> q, out, max, sum, own, scores;
};

int64_t row_of(const Attention& a, const Strip& s, int r) {
    int64_t rows = s.event->stop - s.event->first;
    return s.event->first + std::min((s.index * MR + r) / a.G, rows - 1);
}

int64_t group_of(const Attention& a, const Strip& s, int r) {
    int64_t pairs = (s.event->stop - s.event->first) * a.G;
    return std::min(s.index * MR + r, pairs - 1) % a.G;
}

// [n][D] rows to panels [ceil(n / NR)][D][NR], filled up with 0.
void pack_keys(const float* k, int64_t ld, int64_t n, int64_t D, float* to) {
    for (int64_t p = 0; p < ceil_div(n, NR); p++)
        for (int64_t d = 0; d < D; d++)
            for (int64_t j = p * NR; j < (p + 1) * NR; j++, to++) *to = j < n ? k[j * ld + d] : 0.0f;
}

// [n][D] rows to panels [ceil(D / NR)][n][NR], filled up with 0.
void pack_values(const float* v, int64_t ld, int64_t n, int64_t D, float* to) {
    for (int64_t d = 0; d < D; d += NR)
        for (int64_t j = 0; j < n; j++, to += NR)
            for (int64_t c = 0; c < NR; c++) to[c] = d + c < D ? v[j * ld + d + c] : 0.0f;
}

int64_t values_at(int64_t n, int64_t D) { return ceil_div(n, NR) * NR * D; }

int64_t block_size(int64_t D) { return BLOCK * (D + ceil_div(D, NR) * NR); }

// A block of n <= BLOCK keys and their values: panels of keys, then panels of values.
void pack_block(const float* k, int64_t k_ld, const float* v, int64_t v_ld, int64_t n, int64_t D, float* to) {
    pack_keys(k, k_ld, n, D, to);
    pack_values(v, v_ld, n, D, to + values_at(n, D));
}

typedef float quad __attribute__((vector_size(16), aligned(4)));
template <class F>
static inline float fold(vec v, F f) {
    float lanes[VL];
    store(lanes, v);
    quad q = *(quad*)lanes;
    for (int i = 4; i < VL; i += 4) q = f(q, *(quad*)(lanes + i));
    quad r = f(q, quad{q[2], q[3], q[0], q[1]});
    r = f(r, quad{r[1], r[0], r[3], r[2]});
    return r[0];
}
static inline float highest(vec v) { return fold(v, [](quad a, quad b) { return a > b ? a : b; }); }
static inline float sum_of(vec v) { return fold(v, [](quad a, quad b) { return a + b; }); }

// Softmax numerators of one row of scores in place; what is hidden becomes exactly 0. Updates the
// row's maximum and sum, and returns the factor for what was summed before.
float soften(float* s, int64_t width, float& max, float& sum) {
    vec m0 = load(s), m1 = load(s + VL);
    for (int64_t j = NR; j < width; j += NR) {
        vec x = load(s + j), y = load(s + j + VL);
        m0 = m0 > x ? m0 : x;
        m1 = m1 > y ? m1 : y;
    }
    m0 = m0 > m1 ? m0 : m1;
    float most = max;
    most = std::max(most, highest(m0));
    vec total = {};
#pragma GCC unroll 4
    for (int64_t j = 0; j < width; j += VL) {
        vec e = exp2v(load(s + j) - most);
        total += e;
        store(s + j, e);
    }
    float added = 0, factor = max == most ? 1.0f : exp2v(splat(max - most))[0];
    added = sum_of(total);
    sum = sum * factor + added;
    max = most;
    return factor;
}

// Prefix blocks of all heads, packed once per call and read by all threads.
class Packed {
  public:
    void pack(const Attention& a) {
        spans_.clear();
        first_.clear();
        std::vector<std::pair<size_t, int64_t>> blocks;  // a span, and its first key
        for (const Event* e = a.events; e < a.events + a.event_count; e++)
            for (const Span* s = e->spans; s < e->spans + e->span_count; s++) {
                if (find(*s) < spans_.size()) continue;
                spans_.push_back(*s);
                first_.push_back(blocks.size());
                for (int64_t j = 0; j < s->n; j += BLOCK) blocks.push_back({spans_.size() - 1, j});
            }
        size_ = block_size(a.D);
        heads_ = a.H;
        floats_.resize(blocks.size() * heads_ * size_);
#pragma omp parallel for collapse(2)
        for (size_t b = 0; b < blocks.size(); b++)
            for (int64_t h = 0; h < heads_; h++) {
                const Span& s = spans_[blocks[b].first];
                int64_t j = blocks[b].second, at = (h * s.n + j) * a.D;
                pack_block(s.k + at, a.D, s.v + at, a.D, std::min(BLOCK, s.n - j), a.D,
                           &floats_[(b * heads_ + h) * size_]);
            }
    }

    const float* block(const Span& span, int64_t head, int64_t number) const {
        return &floats_[((first_[find(span)] + number) * heads_ + head) * size_];
    }

  private:
    std::vector<Span> spans_;
    std::vector<int64_t> first_;  // number of a span's first block
    std::vector<float> floats_;
    int64_t size_ = 0, heads_ = 0;

    size_t find(const Span& span) const {
        size_t i = 0;
        while (i < spans_.size() && spans_[i].k != span.k) i++;
        return i;
    }
};

class Worker {
  public:
    Worker(const Attention& a, const std::vector<Strip>& strips, const Packed& packed, Scratch& s)
        : a_(a), strips_(strips), packed_(packed), s_(s), wide_(ceil_div(a.D, NR) * NR) {}

    void run(const Task& t) {
        begin_ = t.begin;
        head_ = t.head;
        gather(t);
        const Event& first = *strips_[t.begin].event;
        int64_t before = 0;
        for (int64_t i = 0; i < first.span_count; i++) {
            const Span& span = first.spans[i];
            for (int64_t j = 0; j < span.n; j += BLOCK)
                prefix_block(t, packed_.block(span, head_, j / BLOCK), std::min(BLOCK, span.n - j),
                             before + j);
            before += span.n;
        }
        for (int64_t i = t.begin; i < t.end;) {
            int64_t end = i;
            while (end < t.end && strips_[end].event == strips_[i].event) end++;
            own_rows(i, end);
            i = end;
        }
        scatter(t);
    }

  private:
    const Attention& a_;
    const std::vector<Strip>& strips_;
    const Packed& packed_;
    Scratch& s_;
    int64_t wide_, begin_ = 0, head_ = 0;

    void gather(const Task& t) {
        int64_t pairs = (t.end - t.begin) * MR;
        s_.q.resize(pairs * a_.D);
        s_.out.assign(pairs * wide_, 0.0f);
        s_.max.resize(pairs);
        s_.sum.resize(pairs);
        s_.own.resize(block_size(a_.D));
        s_.scores.resize(GROUP * MR * BLOCK);
        for (int64_t i = 0; i < pairs; i++) {
            const Strip& strip = strips_[t.begin + i / MR];
            int64_t row = row_of(a_, strip, i % MR), head = head_ * a_.G + group_of(a_, strip, i % MR);
            const float* from = a_.q + head * a_.q_head + row * a_.q_row;
            for (int64_t d = 0; d < a_.D; d++) s_.q[i * a_.D + d] = from[d] * (a_.scale * LOG2E);
            // A sink takes part in the denominator and has no value.
            s_.max[i] = a_.sinks ? a_.sinks[head] * LOG2E : -1e30f;
            s_.sum[i] = a_.sinks ? 1.0f : 0.0f;
        }
    }

    void prefix_block(const Task& t, const float* packed, int64_t n, int64_t at) {
        for (int64_t i = t.begin; i < t.end; i += GROUP)
            block(i, std::min<int64_t>(GROUP, t.end - i), packed, n, n, [&](int64_t strip, int r, float* s) {
                int64_t oldest = a_.window ? a_.positions[row_of(a_, strips_[strip], r)] - a_.window + 1 : 0;
                hide(s, std::clamp<int64_t>(oldest - at, 0, n), n, n);
            });
    }

    void own_rows(int64_t begin, int64_t end) {
        const Event& e = *strips_[begin].event;
        const float* k = a_.k + head_ * a_.k_head + e.start * a_.k_row;
        const float* v = a_.v + head_ * a_.v_head + e.start * a_.v_row;
        for (int64_t j = 0; j < e.stop - e.start; j += BLOCK) {
            int64_t n = std::min(BLOCK, e.stop - e.start - j);
            pack_block(k + j * a_.k_row, a_.k_row, v + j * a_.v_row, a_.v_row, n, a_.D, s_.own.data());
            for (int64_t i = begin; i < end; i += GROUP) {
                int64_t count = std::min<int64_t>(GROUP, end - i);
                int64_t last = row_of(a_, strips_[i + count - 1], MR - 1) - e.start - j;
                if (last < 0) continue;
                int64_t seen = std::min(n, last + 1);
                block(i, count, s_.own.data(), n, seen, [&](int64_t strip, int r, float* s) { hide_own(s, strip, r, j, seen); });
            }
        }
    }

    static void hide(float* s, int64_t from, int64_t to, int64_t n) {
        std::fill(s, s + from, HIDDEN);
        std::fill(s + to, s + ceil_div(n, NR) * NR, HIDDEN);
    }

    void hide_own(float* s, int64_t strip, int r, int64_t at, int64_t n) const {
        const Event& e = *strips_[strip].event;
        int64_t row = row_of(a_, strips_[strip], r), own = row - e.start, rows = e.stop - e.start;
        hide(s, 0, std::clamp<int64_t>(own + 1 - at, 0, n), n);
        for (int64_t j = 0; j < n; j++) {
            bool seen = !e.tree || e.tree[own * rows + at + j];
            bool near = !a_.window || a_.positions[row] - a_.positions[e.start + at + j] < a_.window;
            if (!seen || !near) s[j] = HIDDEN;
        }
    }

    // Some strips against the first `seen` keys of a packed block of n.
    template <class Hide>
    void block(int64_t first, int64_t count, const float* packed, int64_t n, int64_t seen, Hide hide_row) {
        int64_t at = (first - begin_) * MR, width = ceil_div(seen, NR) * NR;
        float *q = &s_.q[at * a_.D], *out = &s_.out[at * wide_], *s = s_.scores.data();
        const float* values = packed + values_at(n, a_.D);
        for (int64_t p = 0; p < width; p += NR)
            for (int64_t i = 0; i < count * MR; i += MR)
                tile<MR, true>(q + i * a_.D, a_.D, packed + p * a_.D, NR, a_.D, s + i * BLOCK + p, BLOCK);
        for (int64_t i = 0; i < count * MR; i++) {
            hide_row(first + i / MR, i % MR, s + i * BLOCK);
            float factor = soften(s + i * BLOCK, width, s_.max[at + i], s_.sum[at + i]);
            if (factor == 1.0f) continue;
            for (int64_t d = 0; d < wide_; d += VL)
                store(out + i * wide_ + d, load(out + i * wide_ + d) * factor);
        }
        for (int64_t d = 0; d < wide_; d += NR)
            for (int64_t i = 0; i < count * MR; i += MR)
                tile<MR, false>(s + i * BLOCK, BLOCK, values + d * n, NR, seen, out + i * wide_ + d, wide_);
    }

    void scatter(const Task& t) {
        for (int64_t i = t.begin; i < t.end; i++) {
            const Strip& strip = strips_[i];
            int64_t pairs = (strip.event->stop - strip.event->first) * a_.G - strip.index * MR;
            for (int r = 0; r < std::min<int64_t>(MR, pairs); r++) {
                int64_t at = (i - begin_) * MR + r, head = head_ * a_.G + group_of(a_, strip, r);
                float* to = a_.out + (row_of(a_, strip, r) * a_.H * a_.G + head) * a_.D;
                for (int64_t d = 0; d < a_.D; d++) to[d] = s_.out[at * wide_ + d] / s_.sum[at];
            }
        }
    }
};

}  // namespace

extern "C" void attend(const Attention* a) {
    std::vector<Strip> strips;
    for (const Event* e = a->events; e < a->events + a->event_count; e++)
        for (int64_t i = 0; i < ceil_div((e->stop - e->first) * a->G, MR); i++) strips.push_back({e, i});
    static thread_local Packed packed;
    packed.pack(*a);
    // Long tasks read a block often while it is near; there are enough of them to share.
    int64_t count = strips.size(), fair = ceil_div(count * a->H, 16 * omp_get_max_threads());
    int64_t length = std::clamp<int64_t>(ceil_div(fair, GROUP) * GROUP, GROUP, 480 / MR);
    std::vector<Task> tasks;
    for (int64_t i = 0; i < count;) {
        int64_t end = i;
        while (end < count && end - i < length && strips[end].event->spans == strips[i].event->spans) end++;
        for (int64_t h = 0; h < a->H; h++) tasks.push_back({h, i, end});
        i = end;
    }
    const Packed& blocks = packed;  // the caller's, and not the one of each thread
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); i++) {
        static thread_local Scratch scratch;
        Worker(*a, strips, blocks, scratch).run(tasks[i]);
    }
}

typedef uint16_t half_vec __attribute__((vector_size(VL * 2), aligned(2)));

// Elements as fp32 vectors: fp32 as it is, bf16 widened, and rounded to nearest even when stored.
static inline vec get(const float* p) { return load(p); }
static inline void put(float* p, vec v) { store(p, v); }
static inline vec get(const uint16_t* p) {
    return (vec)(__builtin_convertvector(*(const half_vec*)p, ivec) << 16);
}
static inline void put(uint16_t* p, vec v) {
    ivec bits = (ivec)v, rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    bits = v == v ? rounded : bits | 0x400000;  // a NaN stays one
    *(half_vec*)p = __builtin_convertvector(bits >> 16, half_vec);
}

// The vector at j of a row of d: short rows and the end of a row are filled up with 0.
template <class T>
static inline vec get_some(const T* row, int64_t j, int64_t d) {
    if (j + VL <= d) return get(row + j);
    T some[VL] = {};
    std::copy(row + j, row + d, some);
    return get(some);
}

template <class T>
static inline void put_some(T* row, int64_t j, int64_t d, vec v) {
    if (j + VL <= d) return put(row + j, v);
    T some[VL];
    put(some, v);
    std::copy_n(some, d - j, row + j);
}

template <class T>
static void norm_rows(const T* x, const T* weight, T* y, int64_t rows, int64_t d, float eps,
                      float offset) {
#pragma omp parallel for
    for (int64_t i = 0; i < rows; i++) {
        const T* from = x + i * d;
        vec lanes = {};
        for (int64_t j = 0; j < d; j += VL) {
            vec v = get_some(from, j, d);
            lanes += v * v;
        }
        float squares = 0;
        for (int l = 0; l < VL; l++) squares += lanes[l];
        float inverse = 1.0f / std::sqrt(squares / d + eps);
        for (int64_t j = 0; j < d; j += VL)
            put_some(y + i * d, j, d, get_some(from, j, d) * inverse * (offset + get_some(weight, j, d)));
    }
}

// y = x / sqrt(mean(x^2) + eps) * (offset + weight), over rows of d; bf16 where `narrow`
extern "C" void rms_norm(const void* x, const void* weight, void* y, int64_t rows, int64_t d,
                         float eps, float offset, int64_t narrow) {
    if (narrow) norm_rows((const uint16_t*)x, (const uint16_t*)weight, (uint16_t*)y, rows, d, eps, offset);
    else norm_rows((const float*)x, (const float*)weight, (float*)y, rows, d, eps, offset);
}

template <class T>
static void gate_rows(T* gate, const T* up, int64_t n) {
#pragma omp parallel for
    for (int64_t i = 0; i < ceil_div(n, VL); i++)
        put_some(gate, i * VL, n, silu(get_some(gate, i * VL, n)) * get_some(up, i * VL, n));
}

// gate = silu(gate) * up, in place, over n numbers; bf16 where `narrow`
extern "C" void silu_mul(void* gate, const void* up, int64_t n, int64_t narrow) {
    if (narrow) gate_rows((uint16_t*)gate, (const uint16_t*)up, n);
    else gate_rows((float*)gate, (const float*)up, n);
}
