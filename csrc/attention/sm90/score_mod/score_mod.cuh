// The policy of a tile's features.
#pragma once

#include <type_traits>

#include "bias.cuh"
#include "dropout.cuh"
#include "generated.cuh"
#include "scores.cuh"

namespace flashbwd::sm90 {

template <typename Traits>
using ScoresWithoutDropout =
    std::conditional_t<Traits::kBias, BiasScores<Traits>,
                       std::conditional_t<has(Traits::kTile, feature::kSoftcap), CappedScores<Traits>,
                                          std::conditional_t<has(Traits::kTile, feature::kShifts),
                                                             ShiftedScores<Traits>, PlainScores<Traits>>>>;

template <typename Traits>
using ScoreMod =
    std::conditional_t<has(Traits::kTile, feature::kGenerated), GeneratedScores<Traits>,
                       std::conditional_t<Traits::kDrops, DroppedScores<Traits, ScoresWithoutDropout<Traits>>,
                                          ScoresWithoutDropout<Traits>>>;

}  // namespace flashbwd::sm90
