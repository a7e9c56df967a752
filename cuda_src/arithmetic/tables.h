// What a launch is given: one row a weight, made in Python as an int64 table [weights, fields] on
// the device that reads it. Fields are 64 bits wide, addresses included, so the table needs no
// padding rules.
//
// A row holds what one operation reads of a TensorOperand (zerocast/numerics), and is written by
// zerocast/backends/tables.py. The index arithmetic is here too: an element's flat index in its
// whole weight decides its block, its byte and its nibble. What a weight has none of is 0 in its
// row.
#pragma once

#include "arithmetic/lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// A [rows, cols] matrix cut into blocks; ragged edges are served.
struct Grid {
    i64 rows, cols;
    i64 block_h, block_w;

    ZEROCAST_FN i64 numel() const { return rows * cols; }
    ZEROCAST_FN i64 blocks_h() const { return (rows + block_h - 1) / block_h; }
    ZEROCAST_FN i64 blocks_w() const { return (cols + block_w - 1) / block_w; }
    ZEROCAST_FN i64 num_blocks() const { return blocks_h() * blocks_w(); }
};

enum Nominal : i64 { NOMINAL_FP32 = 0, NOMINAL_BF16 = 1, NOMINAL_FP16 = 2 };
enum FormatId : i64 { FORMAT_E2M1 = 0, FORMAT_E4M3 = 1, FORMAT_E5M2 = 2 };

// The state of delayed scaling for one tensor; scale is null under all other numerics, the
// rest where closing a cast does not advance it.
struct DelayedState {
    float* scale;       // [1]
    float* cast_scale;  // [1]
    float* history;     // [length], newest first
    i64 length;
};

// The place of `value` in a list that ascends, or -1.
ZEROCAST_FN i64 find(const i64* list, i64 length, i64 value) {
    i64 first = 0, last = length;
    while (first < last) {
        i64 middle = first + (last - first) / 2;
        if (list[middle] < value)
            first = middle + 1;
        else
            last = middle;
    }
    return first < length && list[first] == value ? first : -1;
}

// What 4-over-6 decides by; choices is null under all other numerics. Errors and elements stand for
// FP32 values.
struct Candidates {
    u8* choices;     // [blocks], as amaxes: 1 for map4, 0 for map6
    const i64* cut;  // [cuts], ascending: the rows of blocks that are cut
    i64 cuts;
    float* row_errors;    // [cuts, block_h, blocks_w, 2]
    const i64* segments;  // [segment_count], ascending: the first element of each segment
    i64 segment_count;
    float* elements;  // [segment_count, block_w]

    // The errors of one row inside row `cut` of those rows of blocks, in its first block: of map4,
    // then of map6; the next block's follow.
    ZEROCAST_FN float* errors_of(const Grid& grid, i64 cut_row, i64 row_in_block) const {
        return row_errors + (cut_row * grid.block_h + row_in_block) * grid.blocks_w() * 2;
    }
};

// Where the random bits of a weight come from; the counter is null without stochastic rounding.
struct RandomBits {
    const i64* counter;  // [2]: the hash of the weight's name, the step
    // Of a tensor-parallel shard: the index of its first element in the whole weight, the elements
    // of the whole between one of its rows and the next, and its columns.
    i64 origin, skip, cols;

    // The index in the whole weight of an element of the shard.
    ZEROCAST_FN i64 in_whole(i64 element) const {
        return element + origin + (skip ? element / cols * skip : 0);
    }

    // Whether four elements from a multiple of four on, of one row, are so in the whole, too.
    ZEROCAST_FN bool keeps_fours() const {
        return (origin | skip) % 4 == 0 && (!skip || cols % 4 == 0);
    }
};

// A shard of a master, found when the launch runs.
struct Master {
    const void* data;
    i64 dtype;  // Nominal
};
static_assert(sizeof(Master) == 2 * sizeof(i64), "a row that Python writes");

// One plane of codes that are cast.
struct CodePlane {
    Grid grid;
    i32* block_amax;  // [blocks]; there may be memory for those of the shard's rows alone
    u8* codes;        // of the elements from codes_start on
};

// What 4-over-6 chooses by, too.
struct CastShard {
    const Master* master;
    i64 start, end;              // elements of the whole weight
    i64 whole_begin, whole_end;  // of these, the rows of blocks that one pass measures and casts
    i64 round_to;                // Nominal
    i64 codes_start;             // even where codes are nibbles
    i32* tensor_amax;            // [1], or null; may be the block amax where there is one block
    CodePlane rowwise;
    CodePlane columnwise;  // over the same matrix; its codes are null where it is not cast
    DelayedState delayed;
    Candidates candidates;
    RandomBits random_bits;

    ZEROCAST_FN i64 size() const { return end - start; }
};
static_assert(sizeof(CastShard) == 35 * sizeof(i64), "a row that Python writes");

// One step of AdamW on one tensor; its state is ordered as its elements are. The numbers are FP32
// bit patterns.
struct AdamWUpdate {
    float* master;  // null where nothing is updated
    const float* gradient;
    float* exp_avg;
    float* exp_avg_sq;
    float* max_exp_avg_sq;  // null without amsgrad
    i64 count;              // elements
    i64 decay;              // what an element is multiplied by first
    i64 sign;               // of the gradient: 1 or -1
    i64 average_weight;     // what the average's distance from the gradient is multiplied by
    i64 from_gradient;      // whether it is added to the gradient, and not to the average
    i64 square_decay, square_weight;
    i64 correction;  // of the square root
    i64 eps;
    i64 step;  // negative
};
static_assert(sizeof(AdamWUpdate) == 15 * sizeof(i64), "a row that Python writes");

// A stored plane of block scales: the scale of block (i, j) stands at entries (r, c) with r from
// i * row_repeat and c from j * col_repeat on, as far as they are below rows and cols. Stored
// transposed, entry (r, c) is found at (c, r).
struct ScalePlane {
    Grid grid;
    i64 row_repeat, col_repeat;
    i64 transposed;
    i64 rows, cols;                // entries that hold scales, before the plane is transposed
    i64 padded_rows, padded_cols;  // the plane as it is stored
    i64 padding;                   // bit pattern of entries that belong to no block
    const i32* block_amax;         // [blocks]; or, where scales are expanded, one of each block
    void* scale_inv;               // [padded_rows, padded_cols]; null where there is no plane

    // The scale of block (i, j) is the stored entry i * down() + j * right().
    ZEROCAST_FN i64 down() const { return row_repeat * (transposed ? 1 : padded_cols); }
    ZEROCAST_FN i64 right() const { return col_repeat * (transposed ? padded_cols : 1); }
};

struct ScaleTarget {
    ScalePlane rowwise;
    ScalePlane columnwise;   // of a second plane, quantized independently
    const i32* tensor_amax;  // [1]
    i32* amax;               // FP32 [1] by its bits, or null
    DelayedState delayed;
    const u8* choices;      // [blocks] under 4-over-6, else null
    i64* rounding_counter;  // [2], or null
};
static_assert(sizeof(ScaleTarget) == 36 * sizeof(i64), "a row that Python writes");

struct TransposeTarget {
    i64 format;             // FormatId
    i64 scale_bytes;        // of one stored scale
    const u8* codes;        // of the matrix of rowwise.grid
    u8* columnwise_codes;   // of the transposed one
    ScalePlane rowwise;     // neither is stored transposed, nor repeats to the right
    ScalePlane columnwise;  // its scale_inv is null where one scale serves both
};
static_assert(sizeof(TransposeTarget) == 32 * sizeof(i64), "a row that Python writes");

struct DequantizeTarget {
    ScalePlane plane;
    const u8* codes;
    const float* amax;  // [1], or null
    float* out;         // the matrix of plane.grid
};
static_assert(sizeof(DequantizeTarget) == 17 * sizeof(i64), "a row that Python writes");

// Bytes of a weight's codes, and their place in the buffer in which they travel.
struct CopyTarget {
    u8* codes;
    i64 staged;  // their first byte in the buffer
    i64 bytes;
};
static_assert(sizeof(CopyTarget) == 3 * sizeof(i64), "a row that Python writes");

// Bytes of a tensor, and the sum that their digest is added to.
struct DigestTarget {
    const u8* data;
    i64 first;  // the place of the first in the whole tensor
    i64 bytes;
    u64* sum;
};
static_assert(sizeof(DigestTarget) == 4 * sizeof(i64), "a row that Python writes");

// Which elements of some of a tensor's were changed.
struct Changes {
    u64* flags;   // a bit for each element
    u64* digest;  // [2]: what they add to the digest of the whole tensor, and how many they are
};

// Elements as they were, and as they are: integers.
struct Comparison {
    u8* held;  // receives the values
    const u8* values;
    i64 count;
    i64 itemsize;  // bytes of one: 1, 2, 4 or 8
    i64 first;     // the place of the first in the whole tensor
    Changes changes;
};
static_assert(sizeof(Comparison) == 7 * sizeof(i64), "a row that Python writes");

// The elements whose flags are set, as the runs that travel.
struct RunsTarget {
    const u64* flags;
    const u8* values;
    i64 count;
    i64 itemsize;
    i64* sizes;  // [2]: entries and elements: the most there may be, then what they are
    u8* data;    // gaps, lengths, elements, with room for the most
};
static_assert(sizeof(RunsTarget) == 6 * sizeof(i64), "a row that Python writes");

enum NumericsKind : i64 {
    NUMERICS_FLOAT8 = 0,
    NUMERICS_DELAYED = 1,
    NUMERICS_MX = 2,
    NUMERICS_NVFP4 = 3
};
enum ErrorKind : i64 { ERROR_NONE = 0, ERROR_MAE = 1, ERROR_MSE = 2 };
enum ScaleFormula : i64 { SCALE_RECIPROCAL = 0, SCALE_QUOTIENT = 1, SCALE_INVERSE_FIRST = 2 };
enum ScaleRounding : i64 { SCALE_UP = 0, SCALE_FLOOR = 1, SCALE_EVEN = 2 };

// Which numerics, and their parameters; those of others are 0.
struct NumericsTable {
    i64 kind;    // NumericsKind
    i64 format;  // FormatId of the codes
    // FP8 with an FP32 scale a block.
    i64 power_2_scale;
    i64 amax_epsilon;  // FP32 bit pattern
    i64 formula;       // ScaleFormula
    // Delayed scaling.
    i64 scaled_max;  // FP32 bit pattern of max * 2^-margin
    i64 most_recent;
    // MX.
    i64 scale_rounding;  // ScaleRounding
    // NVFP4.
    i64 scale_max;
    i64 four_over_six;  // ErrorKind
    i64 stochastic_rounding;
    i64 seed;
    i64 one_level_amax;  // FP32 bit pattern, or 0 where the tensor scale follows the amax
};
static_assert(sizeof(NumericsTable) == 13 * sizeof(i64), "a row that Python writes");

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
