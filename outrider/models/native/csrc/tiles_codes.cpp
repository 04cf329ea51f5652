// Products with codes in planes, and with indices of a table.
#include "tiles.h"

namespace outrider {

template Tiles tiles<Codes<2, 16>>;
template Tiles tiles<Codes<3, 16>>;
template Tiles tiles<Codes<5, 32>>;
template Tiles tiles<Codes<6, 16>>;
template Tiles tiles<Codes<4, 32, Values::kIQ4>>;
template Tiles tiles<Codes<4, 32, Values::kFP4>>;

}  // namespace outrider
