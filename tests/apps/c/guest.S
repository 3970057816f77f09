/*
 * The guest of the migrations: a kernel of the Multiboot specification that writes a pattern into a third of its memory
 * over and over and checks it before each time. Word n of round r is r * 0x9e3779b1 + n * 0x85ebca6b, so that a page
 * of another round, or of another place, is found out.
 *
 * It tells its rounds at the serial port: 'R' once a round is checked, 'B' and no more if a word is wrong.
 */
#define FIRST 0x1000000			/* 16 MiB */
#define WORDS (0x1000000 / 4)		/* 16 MiB of them */
#define COM1 0x3f8

	.section .text
	.code32
	.align 4
	/* Multiboot header: magic, flags, checksum. */
	.long 0x1badb002, 0, -0x1badb002

	.globl start
start:
	cli
	xor %ebp, %ebp			/* what round r adds */
	call fill
again:
	call check
	mov $'R', %al
	mov $COM1, %edx
	outb %al, %dx
	add $0x9e3779b1, %ebp
	call fill
	jmp again

fill:
	mov $FIRST, %edi
	mov $WORDS, %ecx
	mov %ebp, %eax
1:	mov %eax, (%edi)
	add $4, %edi
	add $0x85ebca6b, %eax
	loop 1b
	ret

check:
	mov $FIRST, %esi
	mov $WORDS, %ecx
	mov %ebp, %eax
1:	cmp %eax, (%esi)
	jne bad
	add $4, %esi
	add $0x85ebca6b, %eax
	loop 1b
	ret

bad:
	mov $'B', %al
	mov $COM1, %edx
	outb %al, %dx
	hlt
	jmp bad
