// Compiled in every mode and standard: included twice, and not first.
#include <string.h>
#include "../../kimi_mla.h"
#include "../../kimi_mla.h"
