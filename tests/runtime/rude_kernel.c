/* Would run code when it is loaded; the runtime must not let it. */

extern int rude_ran;
int rude_ran = 0;

__attribute__((constructor)) static void Run(void) { rude_ran = 1; }

void square(void);
void square(void) {}
