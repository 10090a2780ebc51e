#pragma once
#include <poplar/Tensor.hpp>

namespace poplar {

struct DebugContext {
  DebugContext() {}
  DebugContext(const char *) {}
  DebugContext(std::string) {}
};

enum class VariableMappingMethod { NONE, LINEAR };

class Graph {
public:
  bool has_popops = false;

  Tensor addVariable(const Type &type, ArrayRef<std::size_t> shape, VariableMappingMethod method,
                     const DebugContext & = {}) {
    if (method != VariableMappingMethod::LINEAR) {
      throw std::logic_error("no tile mapping");
    }
    Tensor tensor;
    tensor.type = type;
    tensor.sizes = shape.get();
    std::size_t number = 1;
    for (std::size_t size : tensor.sizes) {
      number *= size;
    }
    // What is on a tile before anything is written.
    tensor.storage = std::make_shared<std::vector<float>>(number, -12345.0f);
    for (std::size_t i = 0; i < number; ++i) {
      tensor.places.push_back(i);
    }
    return tensor;
  }
};

}  // namespace poplar
