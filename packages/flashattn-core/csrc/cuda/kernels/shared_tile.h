// A tile of rows in shared memory. It consists of panels, one after the other. A panel holds 128 bytes of each row, as
// eight pieces of 16 bytes. Within a panel, piece c of row r is at position c ^ r % 8 of the row. So the eight pieces
// of a row are in different banks, and so are the pieces c of eight neighbouring rows.
#pragma once

#include "offsets.h"
#include "ptx.h"
#include "stored_rows.h"

namespace flashattn {

template <typename T, int ROWS, int COLUMNS>
struct SharedTile {
  static constexpr int kRows = ROWS;
  static constexpr int kElements = 16 / sizeof(T);  // elements per piece
  static constexpr int kPieces = COLUMNS / kElements;
  static constexpr int kPanel = ROWS * 128;
  static constexpr int kBytes = (kPieces + 7) / 8 * kPanel;
  static_assert(COLUMNS % kElements == 0, "whole pieces");

  uint memory;  // the tile's address

  FLASHATTN_FUNC uint piece(uint row, uint c) const {
    return memory + c / 8 * kPanel + row * 128 + ((c % 8 ^ row % 8) << 4);
  }
  // piece_at(lane_offset(row, odd), further_rows, step) is the address of piece 2 * step + odd in row `row` +
  // further_rows. further_rows must be a multiple of 8. A step costs one xor.
  static FLASHATTN_FUNC uint lane_offset(uint row, uint odd) { return row * 128 + ((odd ^ row % 8) << 4); }
  FLASHATTN_FUNC uint piece_at(uint lane_offset, int further_rows, int step) const {
    return memory + step / 4 * kPanel + further_rows * 128 + (lane_offset ^ step % 4 << 5);
  }

  // Starts asynchronous copies of the rows that row_at(row) points to. A row has `columns` elements that are `step`
  // apart. The rest of the tile, and rows for which row_at() returns null, become 0. All THREADS threads must call
  // load_rows(), and then commit their copies.
  template <int THREADS, typename F>
  FLASHATTN_FUNC void load_rows(F row_at, int64_t step, int columns, uint thread) const {
    FLASHATTN_ROLLED
    for (uint at = thread; at < ROWS * kPieces; at += THREADS) {
      uint row = at / kPieces, c = at % kPieces;
      const T* from = row_at(row);
      int count = from != nullptr ? clamped(columns - int(c) * kElements, 0, kElements) : 0;
      from += c * kElements * step;
      if (count > 0 && packed_rows && reinterpret_cast<unsigned long long>(from) % 16 == 0) {
        copy_async(piece(row, c), from, count * int(sizeof(T)));
      } else {
        T* to = static_cast<T*>(shared_pointer(piece(row, c)));
        for (int e = 0; e < kElements; ++e) to[e] = e < count ? from[e * step] : T(0.0f);
      }
    }
  }

  // Starts to copy the first `count` rows of an array, and zeros for the tile's other rows. All THREADS threads must
  // call load(), and then commit their copies.
  template <int THREADS>
  FLASHATTN_FUNC void load(const T* rows, RowLayout layout, int count, int columns, uint thread) const {
    bool wide = packed_rows && (reinterpret_cast<unsigned long long>(rows) | (layout.row * sizeof(T))) % 16 == 0;
    if (THREADS % kPieces == 0 && ROWS * kPieces % THREADS == 0 && wide && count >= ROWS && columns == COLUMNS) {
      constexpr uint kRowsAtOnce = THREADS / kPieces;  // a thread copies piece c of several rows
      uint row = thread / kPieces, c = thread % kPieces;
      const T* from = rows + layout.offset(row, c * kElements);
      FLASHATTN_UNROLL
      for (int i = 0; i < ROWS / int(kRowsAtOnce); ++i, row += kRowsAtOnce, from += kRowsAtOnce * layout.row) {
        copy_async(piece(row, c), from, 16);
      }
    } else {
      const auto row_at = [&](uint row) { return int(row) < count ? rows + layout.offset(row, 0) : nullptr; };
      load_rows<THREADS>(row_at, layout.column, columns, thread);
    }
  }
};

// Tiles of keys and their values, which THREADS threads copy to shared memory. Tile n replaces tile n - STAGES. Keys
// and values may be arrays of several parts (see float_parts.h), of which the rows are those of part 0.
template <typename T, int KEYS, int D, int DV, int STAGES, int THREADS, int KEY_PARTS = 1, int VALUE_PARTS = 1>
struct CopiedTiles {
  using Keys = SharedTile<T, KEYS, D>;
  using Values = SharedTile<T, KEYS, DV>;
  static constexpr int kKeyParts = KEY_PARTS, kValueParts = VALUE_PARTS;
  static constexpr int kStage = KEY_PARTS * Keys::kBytes + VALUE_PARTS * Values::kBytes, kBytes = STAGES * kStage;

  uint memory;
  PlainRows<const T*> key_rows;
  PlainRows<const T*> value_rows;
  uint thread;            // this thread's number among the copying threads
  int64_t part_rows = 0;  // rows from one part of an array to the next

  FLASHATTN_FUNC Keys keys(int n, int part = 0) const {
    return Keys{memory + n % STAGES * kStage + part * Keys::kBytes};
  }
  FLASHATTN_FUNC Values values(int n, int part = 0) const {
    return Values{keys(n, KEY_PARTS).memory + part * Values::kBytes};
  }

  // Starts to copy keys from `first` on, and their values, to tile n: at most KEYS keys, and none from `end` on.
  FLASHATTN_FUNC void load(int n, int first, int end) const {
    if (first < end) {
      load_parts<KEY_PARTS>(keys(n), key_rows, first, end, head_dim);
      load_parts<VALUE_PARTS>(values(n), value_rows, first, end, value_dim);
    }
  }
  template <int PARTS, typename Tile>
  FLASHATTN_FUNC void load_parts(Tile tile, PlainRows<const T*> rows, int first, int end, int columns) const {
    FLASHATTN_UNROLL
    for (int part = 0; part < PARTS; ++part, tile.memory += Tile::kBytes) {
      const T* from = rows.from(first).data + part * part_rows * rows.layout.row;
      tile.template load<THREADS>(from, rows.layout, end - first, columns, thread);
    }
  }
};

}  // namespace flashattn
