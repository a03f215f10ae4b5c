// The bool array of a Tree, and the words of 32 bits that kernels read instead.
#pragma once

#include "mlx/array.h"
#include "mlx/utils.h"

namespace flashattn {

namespace mx = mlx::core;

// Packs a bool array (*B, T, T) into uint32 words (*B, T, T / 32), rounded up. Node j is bit j % 32 of word j / 32. In
// an exported shapeless function, the result is (*B, T, T), and only its first words are used.
mx::array pack_tree(const mx::array& visible);

// Returns a bool array (*B, L, S) that says which keys each query sees. The last keys and queries are the tree's nodes.
// keys_after: for each key, how many keys follow it. queries_after: the same for queries.
mx::array seen_in_tree(const mx::array& tree, const mx::array& keys_after, const mx::array& queries_after,
                       mx::StreamOrDevice s);

}  // namespace flashattn
