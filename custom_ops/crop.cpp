// A crop that copies, as a Poplar custom operation for TensorFlow, and its gradient.
//
// TensorFlow's crop is a view: the whole tensor stays in memory as long as the part is needed, and in a pipeline the
// whole tensor is what is stashed and sent on.  Here the part is copied to a tensor of its own.
//
// The interface is that of "Writing custom operations" in Graphcore's TensorFlow 2 documentation, API level 5
// (SDK 2.5 to 3.4).  The gradient is an operation of its own with the gradient as its only input: a function
// CropNHWC_grad would get the uncropped input as well, which would then be kept for the backward pass.

#include <cstddef>
#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <poplar/Graph.hpp>
#include <poplar/Program.hpp>
#include <poplar/Tensor.hpp>
#include <popops/Zero.hpp>
#include <popops/codelets.hpp>
#include <poputil/exceptions.hpp>

namespace {

// What both operations are told: pixels cut off, and the height and width of the whole image.
struct Crop {
  std::size_t top, left, bottom, right;
  std::size_t height, width;
};

// The attributes are "VERSION top left bottom right height width".  VERSION changes whenever this file computes
// something else: it is part of what TensorFlow hashes, and executables are cached by that hash.
const int kVersion = 1;

Crop parse(const std::string &attributes, const std::string &debug_prefix) {
  std::istringstream in(attributes);
  int version = 0;
  long long numbers[6];
  in >> version;
  for (long long &number : numbers) {
    in >> number;
    if (number < 0) {
      in.setstate(std::ios::failbit);
    }
  }
  if (!in || version != kVersion) {
    throw poputil::poplibs_error(debug_prefix + ": crop attributes '" + attributes +
                                 "' are not those of this library; build it again: make -C custom_ops");
  }
  const auto at = [&numbers](int i) { return static_cast<std::size_t>(numbers[i]); };
  return {at(0), at(1), at(2), at(3), at(4), at(5)};
}

const poplar::Tensor &only_input(const std::vector<poplar::Tensor> &inputs, const std::string &debug_prefix) {
  if (inputs.size() != 1 || inputs[0].rank() != 4) {
    throw poputil::poplibs_error(debug_prefix + ": takes one tensor (batch, height, width, channels)");
  }
  return inputs[0];
}

void check_size(const poplar::Tensor &tensor, std::size_t height, std::size_t width,
                const std::string &debug_prefix) {
  if (tensor.dim(1) != height || tensor.dim(2) != width) {
    throw poputil::poplibs_error(debug_prefix + ": the image has another size than the attributes say");
  }
}

// A tensor of its own, spread evenly over the tiles: in the layout of the whole image the tiles that hold its middle
// would keep as much as before.
poplar::Tensor make_tensor(poplar::Graph &graph, const poplar::Type &type, const std::vector<std::size_t> &shape,
                           const std::string &name) {
  return graph.addVariable(type, shape, poplar::VariableMappingMethod::LINEAR, name);
}

void set_metadata(std::vector<std::int64_t> &allocating_indices,
                  std::vector<std::int64_t> &replica_identical_output_indices,
                  std::map<std::int64_t, std::int64_t> &input_to_output_tensor_aliasing, bool &is_elementwise,
                  bool &is_stateless, bool &is_hashable) {
  allocating_indices.clear();
  replica_identical_output_indices.clear();
  // No output shares memory with an input: that is what these operations are for.
  input_to_output_tensor_aliasing.clear();
  is_elementwise = false;
  // Only stateless operations can be recomputed, and only hashable ones end up in the executable cache.
  is_stateless = true;
  is_hashable = true;
}

}  // namespace

extern "C" {

int32_t custom_op_api_level = 5;

// (batch, height, width, channels) -> the part without its margins.
poplar::program::Program CropNHWC(poplar::Graph &graph, const std::vector<poplar::Tensor> &inputs,
                                  std::vector<poplar::Tensor> &outputs, const std::string &attributes,
                                  const std::string &debug_prefix) {
  const Crop crop = parse(attributes, debug_prefix);
  const poplar::Tensor &image = only_input(inputs, debug_prefix);
  check_size(image, crop.height, crop.width, debug_prefix);
  if (crop.top + crop.bottom >= crop.height || crop.left + crop.right >= crop.width) {
    throw poputil::poplibs_error(debug_prefix + ": nothing is left after the crop");
  }
  const std::size_t batch = image.dim(0), channels = image.dim(3);
  const poplar::Tensor part = image.slice({0, crop.top, crop.left, 0}, {batch, crop.height - crop.bottom,
                                                                        crop.width - crop.right, channels});
  const poplar::Tensor copy = make_tensor(graph, image.elementType(), part.shape(), debug_prefix + "/part");
  poplar::program::Sequence program;
  program.add(poplar::program::Copy(part, copy));
  outputs.push_back(copy);
  return program;
}

// The gradient of CropNHWC: the part's gradient in a frame of zeros.
poplar::program::Program PadNHWC(poplar::Graph &graph, const std::vector<poplar::Tensor> &inputs,
                                 std::vector<poplar::Tensor> &outputs, const std::string &attributes,
                                 const std::string &debug_prefix) {
  popops::addCodelets(graph);
  const Crop crop = parse(attributes, debug_prefix);
  const poplar::Tensor &gradient = only_input(inputs, debug_prefix);
  check_size(gradient, crop.height - crop.top - crop.bottom, crop.width - crop.left - crop.right, debug_prefix);
  const std::size_t batch = gradient.dim(0), channels = gradient.dim(3);
  const poplar::Tensor whole = make_tensor(graph, gradient.elementType(),
                                           {batch, crop.height, crop.width, channels}, debug_prefix + "/whole");
  poplar::program::Sequence program;
  popops::zero(graph, whole, program, debug_prefix + "/zero");
  const poplar::Tensor middle = whole.slice({0, crop.top, crop.left, 0}, {batch, crop.height - crop.bottom,
                                                                          crop.width - crop.right, channels});
  program.add(poplar::program::Copy(gradient, middle));
  outputs.push_back(whole);
  return program;
}

void CropNHWC_metadata(std::vector<std::int64_t> &allocating_indices,
                       std::vector<std::int64_t> &replica_identical_output_indices,
                       std::map<std::int64_t, std::int64_t> &input_to_output_tensor_aliasing, bool &is_elementwise,
                       bool &is_stateless, bool &is_hashable, std::uint32_t /*num_inputs*/) {
  set_metadata(allocating_indices, replica_identical_output_indices, input_to_output_tensor_aliasing, is_elementwise,
               is_stateless, is_hashable);
}

void PadNHWC_metadata(std::vector<std::int64_t> &allocating_indices,
                      std::vector<std::int64_t> &replica_identical_output_indices,
                      std::map<std::int64_t, std::int64_t> &input_to_output_tensor_aliasing, bool &is_elementwise,
                      bool &is_stateless, bool &is_hashable, std::uint32_t /*num_inputs*/) {
  set_metadata(allocating_indices, replica_identical_output_indices, input_to_output_tensor_aliasing, is_elementwise,
               is_stateless, is_hashable);
}

}  // extern "C"
