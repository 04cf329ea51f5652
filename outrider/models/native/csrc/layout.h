// The layout of the structures that Python fills. `abi.py` compares it with its own when the library is loaded.
#pragma once

#include <cstddef>
#include <cstdint>

// Apply OUTRIDER_FIELD to each field. A macro cannot call itself, so its next call is written as OUTRIDER_AGAIN () and
// waits for the next scan of the text. There are 64 scans, and so at most 64 fields.
#define OUTRIDER_EACH(Struct, field, ...) \
  OUTRIDER_FIELD(Struct, field) __VA_OPT__(OUTRIDER_AGAIN OUTRIDER_NO_ARGUMENTS(Struct, __VA_ARGS__))
#define OUTRIDER_AGAIN() OUTRIDER_EACH
#define OUTRIDER_NO_ARGUMENTS ()
#define OUTRIDER_FIELD(Struct, field) , offsetof(Struct, field), sizeof(Struct::field)
#define OUTRIDER_SCAN(...) OUTRIDER_SCAN16(OUTRIDER_SCAN16(OUTRIDER_SCAN16(OUTRIDER_SCAN16(__VA_ARGS__))))
#define OUTRIDER_SCAN16(...) OUTRIDER_SCAN4(OUTRIDER_SCAN4(OUTRIDER_SCAN4(OUTRIDER_SCAN4(__VA_ARGS__))))
#define OUTRIDER_SCAN4(...) OUTRIDER_SCAN1(OUTRIDER_SCAN1(OUTRIDER_SCAN1(OUTRIDER_SCAN1(__VA_ARGS__))))
#define OUTRIDER_SCAN1(...) __VA_ARGS__

// Export the names of all fields, and the size of the structure followed by the offset and the size of each field.
#define OUTRIDER_LAYOUT(Struct, ...)                               \
  extern "C" const char outrider_fields_##Struct[] = #__VA_ARGS__; \
  extern "C" const int32_t outrider_layout_##Struct[] = {          \
      sizeof(Struct) OUTRIDER_SCAN(OUTRIDER_EACH(Struct, __VA_ARGS__))};
