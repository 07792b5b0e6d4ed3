#include "tuner/report.h"
