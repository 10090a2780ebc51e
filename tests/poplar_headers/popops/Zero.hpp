#pragma once
#include <poplar/Program.hpp>

namespace popops {

inline void zero(poplar::Graph &graph, const poplar::Tensor &tensor, poplar::program::Sequence &program,
                 const poplar::DebugContext & = {}) {
  if (!graph.has_popops) {
    throw std::logic_error("popops::addCodelets was not called");
  }
  program.steps.push_back([tensor] {
    for (std::size_t place : tensor.places) {
      (*tensor.storage)[place] = 0.0f;
    }
  });
}

}  // namespace popops
