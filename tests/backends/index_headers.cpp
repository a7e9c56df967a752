// What the headers say of places, by numbers: each function below takes numbers, writes numbers and
// returns how many, for test_index_headers.py. CUDA's words are those of its emulation.
#include "../cuda_emulation/emulation.h"
#include "cpu/scale_rows.h"
#include "cpu/strips.h"
#include "cuda/planes.h"

using namespace zerocast;
#define ANSWER extern "C" i64

static Grid grid_of(const i64* n) { return *(const Grid*)n; }

template <class... Numbers>
static i64 put(i64* out, Numbers... numbers) {
    i64 list[] = {(i64)numbers...}, count = 0;
    for (i64 number : list) out[count++] = number;
    return count;
}

// Of a grid, a row of blocks that is cut, and a row in it.
ANSWER of_grid(const i64* in, i64* out) {
    Grid g = grid_of(in);
    Candidates candidates{};
    auto errors = (u64)candidates.errors_of(g, in[4], in[5]);
    return put(out, g.numel(), g.blocks_h(), g.blocks_w(), g.num_blocks(), errors / sizeof(float));
}

// Of a value, and a list.
ANSWER find_in(const i64* in, i64* out) { return put(out, find(in + 2, in[0], in[1])); }

// Of an origin, a skip, columns, and an element.
ANSWER in_whole(const i64* in, i64* out) {
    RandomBits bits{nullptr, in[0], in[1], in[2]};
    return put(out, bits.in_whole(in[3]), bits.keeps_fours());
}

// Of a grid, a region and the most blocks of a strip: what is called, with which strip and panel.
ANSWER strips(const i64* in, i64* out) {
    i64* to = out;
    auto call = [&to](int what) {
        return [&to, what](const Strip& s, const Panel& p = {}) {
            to += put(to, what, s.first_block, s.blocks, s.col, s.col_end);
            to += put(to, p.element, p.col, p.count, p.rows);
        };
    };
    Region region{in[4], in[5]};
    if (in[7]) region.col = in[6], region.col_end = in[7];
    for_each_strip(grid_of(in), region, call(0), call(1), call(2), in[8]);
    return to - out;
}

// Of a thread, the number of threads, and spans: a span and its piece of this thread each.
ANSWER shared(const i64* in, i64* out) {
    i64 *to = out, count = in[2];
    auto spans = (const Span*)(in + 3);
    share(
        spans, count, in[0], in[1],
        [&](const Span& span) { return &span < spans + count ? span : (abort(), span); },
        [&](const Span& span, i64 begin, i64 end) { to += put(to, &span - spans, begin, end); });
    return to - out;
}

// Of elements and the most threads: for each thread how many there are, summed over its calls.
ANSWER launched(const i64* in, i64* out) {
    for (i64 i = 0; i < in[1]; i++) out[i] = 0;
    in_parallel(in[0], in[1], [&](i64 thread, i64 threads) {
        __atomic_add_fetch(out + thread, threads, __ATOMIC_RELAXED);
    });
    return in[1];
}

// Of two grids, whether there is a second plane, a shard and a number of threads: how it is cut,
// and which elements, all but the first and the last, are cast while measured.
ANSWER cut_of(const i64* in, i64* out) {
    static u8 codes[1];
    CastShard shard{};
    shard.rowwise.grid = grid_of(in), shard.columnwise.grid = grid_of(in + 4);
    shard.columnwise.codes = in[8] ? codes : nullptr;
    shard.start = in[9], shard.end = in[10];
    shard.whole_begin = in[9] + 1, shard.whole_end = in[10] - 1;
    Span span = shard_span(shard, in[11]), whole = whole_rows(shard);
    return put(out, span.begin, span.end, span.granule, block_rows(shard),
               cut_between_blocks(shard, in[11]), in_rows_and_columns(shard), whole.begin,
               whole.end, whole.granule);
}

static ScalePlane plane_of(const i64* n, void* scales) {
    return {grid_of(n), n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], nullptr, scales};
}

// The scale of a block; 0 where there is none, which nothing reads.
struct Made {
    i32 scale;
    operator i32() const { return scale ? scale : (abort(), 0); }
};

// What is stored of a plane whose block number b has the scale b % 97 + 1: all entries, with four
// on either side; then how many entries lie between blocks, down and right.
template <class Stored>
static i64 stored(const i64* in, i64* out) {
    constexpr int GUARD = 4;
    alignas(16) static Stored entries[1 << 16];
    i64 size = in[9] * in[10] + 2 * GUARD, blocks_w = grid_of(in).blocks_w();
    for (i64 i = 0; i < size; i++) entries[i] = 111;
    ScalePlane plane = plane_of(in, entries + GUARD);
    i64 cut = in[14], blocks_h = plane.grid.blocks_h();
    if (in[13] == 0) {  // by the CPU's loops, in two pieces
        auto make = [&](i64 i, Stored* to) {
            for (i64 b = 0; b < blocks_w; b++) to[b] = (i * blocks_w + b) % 97 + 1;
        };
        store_rows<Stored>(plane, 0, cut, make);
        store_rows<Stored>(plane, cut, blocks_h, make);
        pad_rows<Stored>(plane);
    } else {  // by the threads of a CUDA kernel, forwards or backwards, tile by tile
        static Made blocks[1 << 16];
        i64 count = blocks_h * blocks_w, down = in[6] ? 1 : blocks_w, right = in[6] ? blocks_w : 1;
        for (i64 b = 0; b < count + 4; b++) blocks[b].scale = b < count ? (i32)b % 97 + 1 : 0;
        auto scale = [&](i32 made, i64 block) {
            if (block >= count || made != block % 97 + 1) abort();  // no such block, or another
            return sizeof(Stored) == 1 ? made : Scalar::bits((float)made);
        };
        emulation::current = emulation::fibers;
        for (i64 t = 0; t < cut; t++)
            for (int i = 0; i < THREADS; i++) {
                threadIdx.x = in[13] == 1 ? i : THREADS - 1 - i;
                auto& tile = ((const PlaneTile*)(in + 15))[t];
                store_scales<Stored, THREADS>(plane, tile, blocks, down, right, scale);
            }
    }
    for (i64 i = 0; i < size; i++) out[i] = entries[i];
    return size + put(out + size, plane.down(), plane.right());
}
ANSWER stored_scales(const i64* in, i64* out) {
    return in[12] == 1 ? stored<u8>(in, out) : stored<float>(in, out);
}

// Of a tile, its grid, the extent that is owned, and an address: whether vectors keep to blocks,
// whether they are aligned; then of each vector of each thread its first element, whether it is
// owned as a whole, in part, and cut off by the tile's right end; and of its four elements whether
// they are owned, and the block, or -1.
template <class Shape>
static i64 visited(const i64* in, i64* out) {
    Grid grid = grid_of(in);
    auto& shape = *(const Shape*)(in + 7);
    Tile tile = shape.as_tile(grid);
    i64* to = out
              + put(out, vectors_keep_to_blocks<Shape>(tile, grid),
                    vectors_aligned((void*)in[6], 16, tile, grid));
    for (int thread = 0; thread < THREADS; thread++) {
        ThreadVectors vectors = shape.vectors(grid, thread);
        OwnedVectors owned = owned_vectors(vectors, tile, grid, in[4], in[5]);
        for (int i = 0; i < TILE_VECTORS; i++) {
            int left = vectors.cols - vectors.col_of(i);
            bool counted = i < vectors.count;
            to += put(to, vectors.at(i), owned.whole >> i & 1, owned.some >> i & 1,
                      counted && left > 0 && left < 4);
            for (int j = 0; j < 4; j++) {
                int b = shape.block_of(grid, vectors.row_of(i), vectors.col_of(i) + j);
                i64 block = shape.first_block + shape.offset_of(b, grid.blocks_w(), 1);
                to += put(to, counted && owns(vectors, in[4], in[5], i, j),
                          b < shape.num_blocks() ? block : -1);
            }
        }
    }
    return to - out;
}
ANSWER of_tile(const i64* in, i64* out) { return visited<Tile>(in, out); }
ANSWER of_tile_32x256(const i64* in, i64* out) {
    i64 count = visited<Tile32x256>(in, out);
    return count + put(out + count, ((const Tile32x256*)(in + 7))->first_column(grid_of(in)));
}

// Of a plane's stored columns: the threads side by side.
ANSWER across(const i64* in, i64* out) { return put(out, threads_across(in[0])); }

// Of four words of four bytes.
ANSWER transposed(const i64* in, i64* out) {
    u32 bytes[] = {(u32)in[0], (u32)in[1], (u32)in[2], (u32)in[3]};
    transpose_4x4(bytes);
    return put(out, bytes[0], bytes[1], bytes[2], bytes[3]);
}
