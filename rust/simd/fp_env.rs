//! The floating-point environment that every kernel runs in: round to nearest, subnormals kept,
//! exceptions masked.
//!
//! A new thread inherits flush-to-zero from the one that started it, and `torch.set_flush_denormal`
//! sets it for the caller; results must depend on neither, so each kernel entry sets the
//! control register and restores it afterwards.

use std::{arch::asm, marker::PhantomData};

/// While it lives, this thread computes in the standard environment; dropping it restores what was
/// there.
#[must_use]
pub struct StandardFpEnv {
    previous: u64,
    /// The control register belongs to a thread: the guard must not leave it.
    not_send: PhantomData<*const ()>,
}

#[cfg(target_arch = "x86_64")]
fn read_control() -> u64 {
    let mut control = 0_u32;
    // SAFETY: stmxcsr stores 4 bytes at the given address, which is a live u32.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack)) };
    u64::from(control)
}

#[cfg(target_arch = "x86_64")]
fn write_control(control: u64) {
    let control = control as u32;
    // SAFETY: the value is the standard one or was read from this register. Without `nomem`, the
    // compiler keeps the loads and stores of a kernel on their side of the write.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack)) };
}

/// All exceptions masked, round to nearest, no flush-to-zero, no denormals-are-zero.
#[cfg(target_arch = "x86_64")]
const STANDARD: u64 = 0x1f80;

#[cfg(target_arch = "aarch64")]
fn read_control() -> u64 {
    let control: u64;
    // SAFETY: reading FPCR has no side effects.
    unsafe { asm!("mrs {}, fpcr", out(reg) control, options(nostack)) };
    control
}

#[cfg(target_arch = "aarch64")]
fn write_control(control: u64) {
    // SAFETY: the value is the standard one or was read from this register; see above for `nomem`.
    unsafe { asm!("msr fpcr, {}", in(reg) control, options(nostack)) };
}

/// Round to nearest, no flush-to-zero, no default-NaN mode, no traps.
#[cfg(target_arch = "aarch64")]
const STANDARD: u64 = 0;

impl StandardFpEnv {
    /// Sets the standard environment on this thread.
    pub fn enter() -> Self {
        let previous = read_control();
        if previous != STANDARD {
            write_control(STANDARD);
        }
        Self { previous, not_send: PhantomData }
    }
}

impl Drop for StandardFpEnv {
    fn drop(&mut self) {
        write_control(self.previous);
    }
}
