# Functions of the C library that the binary of `cargo xtask dist` brings along, so that it asks for none that
# is newer than glibc 2.28 (`glibc.rs` says how the rest is done). They are hidden: the program's own calls
# reach them, and nobody else's.

    .text

# libm: the newer versions (2.29; 2.35 for hypot) leave out an old way of telling of errors and give the same
# numbers.
    .macro  passed_on name, version
    .symver old_\name, \name@\version
    .globl  \name
    .hidden \name
    .type   \name, @function
\name:
    jmp     *old_\name@GOTPCREL(%rip)
    .size   \name, . - \name
    .endm

    passed_on exp, GLIBC_2.2.5
    passed_on hypot, GLIBC_2.2.5
    passed_on log, GLIBC_2.2.5
    passed_on log2, GLIBC_2.2.5
    passed_on pow, GLIBC_2.2.5

# stat64(path, buffer) and its kin were calls of __xstat64(1, path, buffer) before 2.33; 1 is the layout of
# x86-64.
    .macro  first_is_layout name, old, version
    .symver old_\name, \old@\version
    .globl  \name
    .hidden \name
    .type   \name, @function
\name:
    movq    %rcx, %r8
    movq    %rdx, %rcx
    movq    %rsi, %rdx
    movq    %rdi, %rsi
    movl    $1, %edi
    jmp     *old_\name@GOTPCREL(%rip)
    .size   \name, . - \name
    .endm

    first_is_layout stat64, __xstat64, GLIBC_2.2.5
    first_is_layout lstat64, __lxstat64, GLIBC_2.2.5
    first_is_layout fstat64, __fxstat64, GLIBC_2.2.5
    first_is_layout fstatat64, __fxstatat64, GLIBC_2.4

# gettid (2.30) is one system call.
    .globl  gettid
    .hidden gettid
    .type   gettid, @function
gettid:
    movl    $186, %eax
    syscall
    ret
    .size   gettid, . - gettid

# Rust's library looks whether these are there, and does without them where their address is 0: it makes the
# system call for statx (2.28) itself, and forks where a child that has another folder could be spawned
# (2.29).
    .macro  absent name
    .globl  \name
    .hidden \name
    .set    \name, 0
    .endm

    absent  statx
    absent  posix_spawn_file_actions_addchdir_np

# Before 2.34 a program ran its own constructors: its start passed a function for that to __libc_start_main as
# the fourth argument, where a start file of 2.34 passes none. A newer library still calls that function in
# place of its own.
    .symver old_start_main, __libc_start_main@GLIBC_2.2.5
    .globl  __libc_start_main
    .hidden __libc_start_main
    .type   __libc_start_main, @function
__libc_start_main:
    leaq    run_constructors(%rip), %rcx
    jmp     *old_start_main@GOTPCREL(%rip)
    .size   __libc_start_main, . - __libc_start_main

# run_constructors(argc, argv, environment): `_init`, then the table of constructors in order, each with the
# same three.
    .type   run_constructors, @function
run_constructors:
    pushq   %rbx
    pushq   %rbp
    pushq   %r12
    pushq   %r13
    pushq   %r14
    movl    %edi, %r12d
    movq    %rsi, %r13
    movq    %rdx, %r14
    call    _init
    leaq    __init_array_start(%rip), %rbx
    leaq    __init_array_end(%rip), %rbp
1:  cmpq    %rbp, %rbx
    jae     2f
    movl    %r12d, %edi
    movq    %r13, %rsi
    movq    %r14, %rdx
    call    *(%rbx)
    addq    $8, %rbx
    jmp     1b
2:  popq    %r14
    popq    %r13
    popq    %r12
    popq    %rbp
    popq    %rbx
    ret
    .size   run_constructors, . - run_constructors

    .section .note.GNU-stack, "", @progbits
