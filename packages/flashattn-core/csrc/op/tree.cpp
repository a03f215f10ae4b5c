// Packs and unpacks trees.
#include "tree.h"

#include <vector>

#include "../call/fail.h"
#include "../request/arguments.h"
#include "deferred.h"
#include "mlx/ops.h"
#include "shapeless.h"

namespace flashattn {
namespace {

constexpr int kBits = 32;

// 2^0 to 2^31. Multiplying and dividing by them replaces shifts, because MLX 0.32.4 reads out of bounds if mx.vmap maps
// only one operand of a shift.
mx::array powers() {
  std::vector<uint32_t> powers;
  for (int bit = 0; bit < kBits; ++bit) {
    powers.push_back(uint32_t{1} << bit);
  }
  return mx::array(powers.begin(), {kBits});
}

mx::array packed(const mx::array& visible, mx::StreamOrDevice s) {
  if (visible.shape(kRow) != visible.shape(kColumn)) {  // a shapeless function's later tree
    fail("Tree's visible has shape ", visible.shape(), ", expected (*B, T, T)");
  }
  mx::array size = size_of(visible, kColumn, mx::int32, s);
  mx::array words = is_shapeless() ? numbered(visible, kColumn, false, s)
                                   : mx::arange((visible.shape(kColumn) + kBits - 1) / kBits, mx::int32, s);
  mx::array first = mx::expand_dims(mx::multiply(words, mx::array(kBits), s), -1, s);
  mx::array nodes = mx::add(first, mx::arange(kBits, mx::int32, s), s);  // (words, 32)
  mx::array bits = taken(mx::expand_dims(visible, -2, s), nodes, kColumn, s);
  bits = mx::logical_and(bits, mx::less(nodes, size, s), s);
  return mx::sum(mx::multiply(mx::astype(bits, mx::uint32, s), powers(), s), -1, false, s);
}

}  // namespace

mx::array pack_tree(const mx::array& visible) {
  mx::Stream stream = mx::to_stream({});
  return deferred([stream](const Arrays& given) { return std::vector{packed(given[0], stream)}; }, {visible},
                  stream)[0];
}

mx::array seen_in_tree(const mx::array& tree, const mx::array& keys_after, const mx::array& queries_after,
                       mx::StreamOrDevice s) {
  mx::array last = mx::subtract(size_of(tree, kRow, mx::int32, s), mx::array(1), s);
  mx::array query_node = mx::expand_dims(mx::subtract(last, queries_after, s), -1, s);
  mx::array key_node = mx::expand_dims(mx::subtract(last, keys_after, s), 0, s);
  // Rows before the tree have negative nodes.
  mx::array bits = mx::expand_dims(taken(tree, query_node, kRow, s), -1, s);
  bits = mx::remainder(mx::floor_divide(bits, powers(), s), mx::array(2, mx::uint32), s);
  mx::array seen = taken(mx::flatten(bits, -2, -1, s), key_node, kColumn, s);
  seen = mx::logical_and(mx::not_equal(seen, mx::array(0, mx::uint32), s),
                         mx::greater_equal(query_node, mx::array(0), s), s);
  return mx::logical_or(seen, mx::less(key_node, mx::array(0), s), s);
}

}  // namespace flashattn
