/* Entry in 64-bit long mode with the boot parameters in %rsi, as Linux's 64-bit boot protocol says. */
    .section .text.start, "ax"
    .globl _start
_start:
    cli
    cld
    leaq stack_top(%rip), %rsp
    movq %rsi, %rdi
    call guest_main
1:  hlt
    jmp 1b

    .section .bss
    .balign 16
    .skip 16384
stack_top:

    .section .note.GNU-stack, "", @progbits
