/* What pmesh's native library exports. native/README.md has its rules. */
#ifndef PMESH_H
#define PMESH_H

/* One higher with each change that Python must know of; pmesh/native/__init__.py has the same. */
#define PMESH_ABI 1

#define PMESH_API __attribute__((visibility("default")))

PMESH_API int pmesh_abi(void);

#endif
