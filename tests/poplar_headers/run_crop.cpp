// Runs an operation of crop.cpp on the host: OPERATION, attributes (in one word with commas), four sizes and the
// elements on stdin; rank, sizes, elements and the elements of the input afterwards on stdout.
#include <algorithm>
#include <iostream>

#include <poplar/Program.hpp>

#include "crop.cpp"

int main() {
  std::string operation, attributes;
  std::vector<std::size_t> sizes(4);
  std::cin >> operation >> attributes;
  std::replace(attributes.begin(), attributes.end(), ',', ' ');
  std::size_t number = 1;
  for (std::size_t &size : sizes) {
    std::cin >> size;
    number *= size;
  }
  poplar::Graph graph;
  poplar::Tensor input = graph.addVariable(poplar::HALF, sizes, poplar::VariableMappingMethod::LINEAR);
  for (std::size_t i = 0; i < number; ++i) {
    std::cin >> (*input.storage)[i];
  }
  std::vector<poplar::Tensor> outputs;
  const auto build = operation == "CropNHWC" ? CropNHWC : PadNHWC;
  try {
    build(graph, {input}, outputs, attributes, "test").run();
  } catch (const std::exception &error) {
    std::cout << "error: " << error.what() << std::endl;
    return 1;
  }
  if (outputs.size() != 1 || outputs[0].storage == input.storage || outputs[0].type.number != input.type.number) {
    std::cout << "error: outputs" << std::endl;
    return 1;
  }
  for (std::size_t size : outputs[0].sizes) {
    std::cout << size << ' ';
  }
  std::cout << '\n';
  for (std::size_t place : outputs[0].places) {
    std::cout << (*outputs[0].storage)[place] << ' ';
  }
  std::cout << '\n';
  for (float value : *input.storage) {
    std::cout << value << ' ';
  }
  std::vector<std::int64_t> allocating{7}, identical{7};
  std::map<std::int64_t, std::int64_t> aliasing{{0, 0}};
  bool elementwise = true, stateless = false, hashable = false;
  const auto describe = operation == "CropNHWC" ? CropNHWC_metadata : PadNHWC_metadata;
  describe(allocating, identical, aliasing, elementwise, stateless, hashable, 1);
  std::cout << '\n'
            << custom_op_api_level << ' ' << allocating.size() << ' ' << identical.size() << ' ' << aliasing.size()
            << ' ' << elementwise << ' ' << stateless << ' ' << hashable << std::endl;
}
