#pragma once
#include <poplar/Graph.hpp>

namespace popops {

inline void addCodelets(poplar::Graph &graph) { graph.has_popops = true; }

}  // namespace popops
