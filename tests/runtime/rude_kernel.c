/* Would run code when it is loaded; the runtime must not let it. */

/* volatile: no compiler may run it first and keep the result. */
extern volatile int rude_ran;
volatile int rude_ran = 0;

__attribute__((constructor)) static void Run(void) { rude_ran = 1; }

void square(void);
void square(void) {}
