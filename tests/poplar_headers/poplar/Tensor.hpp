#pragma once
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace poplar {

template <class T> class ArrayRef {
  std::vector<T> values;

public:
  ArrayRef(std::initializer_list<T> list) : values(list) {}
  ArrayRef(const std::vector<T> &list) : values(list) {}
  const std::vector<T> &get() const { return values; }
};

struct Type {
  int number;
};
const Type FLOAT{0}, HALF{1};

// For the tests: one past the last dimension, and the elements in row-major order, as places in the storage.
class Tensor {
public:
  std::shared_ptr<std::vector<float>> storage;
  std::vector<std::size_t> places, sizes;
  Type type{0};

  std::size_t rank() const { return sizes.size(); }
  std::size_t dim(unsigned i) const { return sizes.at(i); }
  std::vector<std::size_t> shape() const { return sizes; }
  Type elementType() const { return type; }

  Tensor slice(ArrayRef<std::size_t> begin, ArrayRef<std::size_t> end) const {
    Tensor part = *this;
    for (unsigned d = 0; d < rank(); ++d) {
      part = part.narrow(begin.get().at(d), end.get().at(d), d);
    }
    return part;
  }

private:
  Tensor narrow(std::size_t begin, std::size_t end, unsigned dimension) const {
    if (begin > end || end > sizes.at(dimension)) {
      throw std::out_of_range("slice");
    }
    std::size_t outer = 1, inner = 1;
    for (unsigned d = 0; d < rank(); ++d) {
      (d < dimension ? outer : inner) *= d == dimension ? 1 : sizes[d];
    }
    Tensor part = *this;
    part.places.clear();
    part.sizes[dimension] = end - begin;
    for (std::size_t o = 0; o < outer; ++o) {
      for (std::size_t i = begin * inner; i < end * inner; ++i) {
        part.places.push_back(places[o * sizes[dimension] * inner + i]);
      }
    }
    return part;
  }
};

}  // namespace poplar
