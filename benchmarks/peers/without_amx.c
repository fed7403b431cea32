/* For --llama-cpp-preload: refuses the system call that asks for AMX's tiles, so that llama.cpp
 * takes its AVX-512 kernels. llama-cpp-python 0.3.36, compiled by g++ 12 on Sapphire Rapids, ends
 * with a general protection fault at its first `ldtilecfg`.
 *
 *     gcc -shared -fPIC -o without_amx.so without_amx.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>

long syscall(long number, ...)
{
	static long (*real)(long, ...);
	long a[6];
	va_list rest;

	if (number == SYS_arch_prctl) {
		errno = EPERM;
		return -1;
	}
	if (!real)
		real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	va_start(rest, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(rest, long);
	va_end(rest);
	return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
