//! The calling thread's floating-point control register.

use std::arch::asm;

/// Flush to zero and, where the machine has a bit for it, take subnormal operands as zero.
#[cfg(target_arch = "x86_64")]
const FLUSH: u64 = (1 << 15) | (1 << 6);
#[cfg(target_arch = "aarch64")]
const FLUSH: u64 = 1 << 24;

/// Bits that operations set as they go.
#[cfg(target_arch = "x86_64")]
const STICKY: u64 = 0x3f;
#[cfg(target_arch = "aarch64")]
const STICKY: u64 = 0;

#[cfg(target_arch = "x86_64")]
fn read() -> u64 {
    let mut control = 0_u32;
    // SAFETY: stores 4 bytes into a live u32.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack)) };
    u64::from(control)
}

#[cfg(target_arch = "x86_64")]
fn write(control: u64) {
    let control = control as u32;
    // SAFETY: a value read from the register, with bits that it has.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack)) };
}

#[cfg(target_arch = "aarch64")]
fn read() -> u64 {
    let control;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, fpcr", out(reg) control, options(nostack)) };
    control
}

#[cfg(target_arch = "aarch64")]
fn write(control: u64) {
    // SAFETY: a value read from the register, with bits that it has.
    unsafe { asm!("msr fpcr, {}", in(reg) control, options(nostack)) };
}

/// Calls `body` on this thread with subnormals flushed, and fails where it does not leave the
/// register as it was.
pub(crate) fn flushing_subnormals(body: impl FnOnce()) {
    let before = read();
    write(before | FLUSH);
    let tiny = std::hint::black_box(f32::MIN_POSITIVE);
    let flushes = std::hint::black_box(tiny * std::hint::black_box(0.5)) == 0.0;
    body();
    let after = read();
    write(before);
    assert!(flushes, "this machine does not flush: the test shows nothing");
    assert_eq!(
        after & !STICKY,
        (before | FLUSH) & !STICKY,
        "the control register was not restored"
    );
}
