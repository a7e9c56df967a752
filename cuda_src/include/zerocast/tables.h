// What a launch is given: one row a weight, made in Python as an int64 table [weights, fields] on
// the device that reads it. Fields are 64 bits wide, addresses included, so the table needs no
// padding rules.
//
// The rows mirror CastShard, ScaleTarget, TransposeTarget and DequantizeTarget of zerocast/ops.py,
// and the index arithmetic is here too: an element's flat index in its whole weight decides its
// block, its byte and its nibble.
#pragma once

#include "lanes.h"

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

struct CastShard {
    const float* const*
        master;      // where the address of the FP32 shard is found when the launch runs
    i64 start, end;  // elements of the whole weight
    Grid grid;
    i64 round_to;      // Nominal
    i32* block_amax;   // [blocks]
    i32* tensor_amax;  // [1]; may be block_amax where there is one block
    u8* codes;         // of the elements from codes_start on
    i64 codes_start;   // even where codes are nibbles

    ZEROCAST_FN i64 size() const { return end - start; }
};

struct ScaleTarget {
    Grid grid;
    i64 row_repeat;                // stored rows of one block
    i64 rows, cols;                // stored rows and columns that hold scales
    i64 padded_rows, padded_cols;  // the stored plane
    i64 padding;                   // bit pattern of entries that belong to no block
    const i32* block_amax;         // [blocks]
    const i32* tensor_amax;        // [1]
    void* scale_inv;               // [padded_rows, padded_cols]
    i32* amax;                     // FP32 [1] by its bits, or null
};

struct TransposeTarget {
    i64 format;            // FormatId
    i64 rows, cols;        // the matrix
    const u8* codes;       // [rows, cols]
    u8* columnwise_codes;  // [cols, rows]
    // The scale plane, and the columnwise one; blocks_h is 0 where one plane serves both.
    i64 blocks_h, blocks_w;
    i64 scale_bytes;              // of one stored scale
    i64 row_repeat, padded_cols;  // rowwise plane
    const u8* scale_inv;
    i64 columnwise_row_repeat,
        columnwise_rows;  // columnwise plane: [columnwise_rows, blocks_h] hold scales
    i64 columnwise_padded_rows, columnwise_padded_cols;
    i64 padding;
    u8* columnwise_scale_inv;
};

struct DequantizeTarget {
    Grid grid;
    i64 row_repeat, padded_cols;
    const u8* codes;
    const void* scale_inv;
    const float* amax;  // [1], or null
    float* out;         // [rows, cols]
};

// Which law, and its parameters.
struct LawTable {
    i64 format;  // FormatId; E2M1 is NVFP4, the others FP8 with an FP32 scale a block
    i64 power_2_scale;
    i64 amax_epsilon;  // FP32 bit pattern
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
