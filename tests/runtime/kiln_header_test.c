/* kiln.h compiles as C11 under every warning, and libkiln_runtime.so answers a
 * C program. */

#include "runtime/kiln.h"

#include <stdio.h>
#include <string.h>

static int Expect(int condition, const char* what) {
  if (!condition) fprintf(stderr, "failed: %s\n", what);
  return condition ? 0 : 1;
}

int main(void) {
  int failures = 0;
  uint32_t major = 0;
  kiln_runtime_version(&major, NULL);
  failures += Expect(major == KILN_RUNTIME_ABI_MAJOR, "version");

  kiln_bundle_t* bundle = NULL;
  kiln_error_t error;
  memset(&error, 0, sizeof(error));
  kiln_status_t status =
      kiln_bundle_open_file("/nonexistent/bundle", NULL, &bundle, &error);
  failures += Expect(status == KILN_STATUS_FILE_NOT_FOUND, "absent file");
  failures += Expect(error.code == status, "error code");
  failures += Expect(strstr(error.message, "no such file") != NULL, "message");
  failures += Expect(
      strcmp(kiln_status_name(status), "KILN_STATUS_FILE_NOT_FOUND") == 0,
      "name");
  failures += Expect(kiln_bundle_close(NULL, NULL) == KILN_STATUS_OK, "close");
  failures += Expect(sizeof(kiln_error_t) == 512, "error size");
  return failures == 0 ? 0 : 1;
}
