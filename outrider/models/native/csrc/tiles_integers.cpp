// Products with weights that are not quantized, and with integers of 8 and 4 bits.
#include "tiles.h"

namespace outrider {

template Tiles tiles<float>;
template Tiles tiles<Half>;
template Tiles tiles<uint16_t>;
template Tiles tiles<Codes<8, kGroup>>;
template Tiles tiles<Codes<8, 32>>;
template Tiles tiles<Codes<4, kGroup>>;
template Tiles tiles<Codes<4, 32>>;

}  // namespace outrider
