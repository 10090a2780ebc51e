#pragma once
#include <functional>
#include <poplar/Graph.hpp>

namespace poplar {
namespace program {

class Program {
public:
  std::vector<std::function<void()>> steps;
  void run() const {
    for (const auto &step : steps) {
      step();
    }
  }
};

class Sequence : public Program {
public:
  void add(const Program &other) { steps.insert(steps.end(), other.steps.begin(), other.steps.end()); }
};

class Copy : public Program {
public:
  Copy(Tensor source, Tensor target, bool = false, const DebugContext & = {}) {
    if (source.sizes != target.sizes || source.type.number != target.type.number) {
      throw std::logic_error("copy between tensors that differ");
    }
    steps.push_back([source, target] {
      for (std::size_t i = 0; i < source.places.size(); ++i) {
        (*target.storage)[target.places[i]] = (*source.storage)[source.places[i]];
      }
    });
  }
};

}  // namespace program
}  // namespace poplar
