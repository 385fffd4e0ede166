/* Entry in 64-bit long mode with the boot parameters in %rsi (Linux's 64-bit boot protocol). */
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

/* The start of another vCPU, copied to the address of its SIPI: from real mode straight to 64-bit
 * mode, with the first vCPU's page tables. */
    .section .rodata
    .balign 16
    .globl ap_start, ap_end, ap_cr3, ap_stack
    .code16
ap_start:
    cli
    cld
    movw %cs, %ax
    movw %ax, %ds
    lgdtl ap_gdt - ap_start
    movl $0x20, %eax            /* PAE */
    movl %eax, %cr4
    movl ap_cr3 - ap_start, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx      /* EFER */
    rdmsr
    orl $0x100, %eax            /* LME */
    wrmsr
    movl %cr0, %eax
    orl $0x80000001, %eax       /* PG, PE */
    movl %eax, %cr0
    ljmpl $0x08, $(0x10000 + ap_long - ap_start)
    .code64
ap_long:
    movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movq ap_stack(%rip), %rsp
    movq $ap_main, %rax
    call *%rax
1:  hlt
    jmp 1b
    .balign 8
ap_table:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff
ap_gdt:
    .word 23
    .long 0x10000 + ap_table - ap_start
    .balign 8
ap_stack:
    .quad 0
ap_cr3:
    .long 0
ap_end:

    .section .bss
    .balign 16
    .skip 16384
stack_top:

    .section .note.GNU-stack, "", @progbits
