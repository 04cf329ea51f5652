// Products with weights that are not quantized, and with integers of 8 and 4 bits.
#include "tiles.h"

namespace outrider {

template const Tiles& tiles<float>();
template const Tiles& tiles<Half>();
template const Tiles& tiles<uint16_t>();
template const Tiles& tiles<Codes<8, kGroup>>();
template const Tiles& tiles<Codes<8, 32>>();
template const Tiles& tiles<Codes<4, kGroup>>();
template const Tiles& tiles<Codes<4, 32>>();

}  // namespace outrider
