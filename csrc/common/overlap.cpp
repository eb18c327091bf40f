#include "overlap.h"

#include <algorithm>

namespace flashbwd {
namespace {

// The values step * n, in bytes, for every integer n from lowest to highest.
struct Term {
  int64_t step;
  int64_t lowest, highest;
};

int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Searches for one value of each term such that they sum to 0, that is, for two bytes with the same address.
//
// Terms with equal steps are merged. Small terms whose values leave no gap are merged into one interval [lowest_,
// highest_], so dense tensors need no search. The other terms are searched from the largest step down. The range of the
// smaller terms leaves few values of n to try, because strides nest in all but contrived views.
class ZeroSum {
 public:
  // Compares any byte of an element of a_bytes with any byte of an element of b_bytes that starts `distance` later.
  ZeroSum(int64_t distance, int64_t a_bytes, int64_t b_bytes)
      : lowest_(distance - (a_bytes - 1)), highest_(distance + (b_bytes - 1)) {}

  void add(int64_t step, int64_t lowest, int64_t highest) {
    if (step == 0 || (lowest == 0 && highest == 0)) return;
    for (int i = 0; i < count_; ++i) {
      if (terms_[i].step != step) continue;
      terms_[i].lowest += lowest;
      terms_[i].highest += highest;
      return;
    }
    terms_[count_++] = {step, lowest, highest};
  }

  bool exists() {
    std::sort(terms_.begin(), terms_.begin() + count_, [](const Term& a, const Term& b) { return a.step < b.step; });
    int absorbed = 0;
    for (; absorbed < count_ && terms_[absorbed].step <= highest_ - lowest_ + 1; ++absorbed) {
      const Term& term = terms_[absorbed];
      lowest_ += term.step * term.lowest;
      highest_ += term.step * term.highest;
    }
    count_ -= absorbed;
    std::copy_n(terms_.begin() + absorbed, count_, terms_.begin());
    below_[0] = {lowest_, highest_};
    for (int i = 0; i < count_; ++i) {
      const Term& term = terms_[i];
      below_[i + 1] = {below_[i].lowest + term.step * term.lowest, below_[i].highest + term.step * term.highest};
    }
    return search(count_, 0);
  }

 private:
  struct Interval {
    int64_t lowest, highest;
  };
  static constexpr int kMostTerms = 2 * TensorDesc::kMaxDims;
  static constexpr int kMostSteps = 1 << 16;  // about a millisecond; views of one packed buffer need fewer than 3^4

  // Whether the first `terms` terms and the interval can sum to -sum.
  bool search(int terms, int64_t sum) {
    if (sum + below_[terms].lowest > 0 || sum + below_[terms].highest < 0) return false;
    if (terms == 0) return true;
    const Term& term = terms_[terms - 1];
    const Interval& rest = below_[terms - 1];
    const int64_t first = std::max(term.lowest, -floor_divide(sum + rest.highest, term.step));
    const int64_t last = std::min(term.highest, floor_divide(-sum - rest.lowest, term.step));
    for (int64_t n = first; n <= last; ++n) {
      if (++steps_ > kMostSteps) return true;  // too many steps: assume that they overlap
      if (search(terms - 1, sum + term.step * n)) return true;
    }
    return false;
  }

  std::array<Term, kMostTerms> terms_;
  std::array<Interval, kMostTerms + 1> below_;  // range of the sum of the first i terms and the interval
  int count_ = 0;
  int steps_ = 0;
  int64_t lowest_, highest_;
};

struct Range {
  uintptr_t first, last;  // bytes
};

Range range_of(const TensorDesc& t) {
  int64_t last = 0;
  for (int i = 0; i < t.dim; ++i) last += (t.sizes[i] - 1) * t.strides[i];
  const auto first = reinterpret_cast<uintptr_t>(t.data);
  return {first, first + last * size_of(t.dtype) + size_of(t.dtype) - 1};
}

}  // namespace

bool share_memory(const TensorDesc& a, const TensorDesc& b) {
  if (a.data == nullptr || b.data == nullptr || a.numel() == 0 || b.numel() == 0) return false;
  const Range range_a = range_of(a), range_b = range_of(b);
  if (range_a.last < range_b.first || range_b.last < range_a.first) return false;
  const int64_t a_bytes = size_of(a.dtype), b_bytes = size_of(b.dtype);
  ZeroSum distance(static_cast<int64_t>(range_b.first - range_a.first), a_bytes, b_bytes);
  for (int i = 0; i < a.dim; ++i) distance.add(a.strides[i] * a_bytes, -(a.sizes[i] - 1), 0);
  for (int i = 0; i < b.dim; ++i) distance.add(b.strides[i] * b_bytes, 0, b.sizes[i] - 1);
  return distance.exists();
}

bool elements_overlap(const TensorDesc& tensor) {
  if (tensor.numel() == 0) return false;
  const int64_t bytes = size_of(tensor.dtype);
  // Consider the first dimension in which two elements differ: their distance there is at least 1, and it is arbitrary
  // in later dimensions.
  for (int first = 0; first < tensor.dim; ++first) {
    const int64_t most = tensor.sizes[first] - 1;
    if (most == 0) continue;
    if (tensor.strides[first] == 0) return true;
    ZeroSum distance(0, bytes, bytes);
    distance.add(tensor.strides[first] * bytes, 1, most);
    for (int i = first + 1; i < tensor.dim; ++i) {
      distance.add(tensor.strides[i] * bytes, -(tensor.sizes[i] - 1), tensor.sizes[i] - 1);
    }
    if (distance.exists()) return true;
  }
  return false;
}

}  // namespace flashbwd
