#include "pmesh.h"

int pmesh_abi(void) {
    return PMESH_ABI;
}
