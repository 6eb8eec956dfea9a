// What all linear maps end with.
#include "linear.h"

#include "simd.h"

namespace signalbox {

void finish(const Op& op, const float* sums, int count, int row, float* out) {
  int i = 0;
  for (out += row; i < count && row + i + WIDTH <= op.n; i += WIDTH) {
    Floats sum = load_floats(sums + i);
    if (op.vector) sum = add(sum, load_floats(op.vector + row + i));
    if (op.flags & ADD) sum = add(sum, load_floats(out + i));
    store_floats(out + i, sum);
  }
  for (; i < count && row + i < op.n; ++i) {
    float sum = sums[i];
    if (op.vector) sum += op.vector[row + i];
    out[i] = op.flags & ADD ? sum + out[i] : sum;
  }
}

}  // namespace signalbox
