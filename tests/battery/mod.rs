//! What the tests of kernels, codecs and steps share: guarded memory, tensors in every layout,
//! generators, the oracle's bounds.
#![allow(dead_code, unused_imports, reason = "every test file uses a part of it")]

mod bounds;
mod draw;
mod fp_control;
mod guarded;
mod held;

use std::sync::OnceLock;

use proptest::test_runner::Config;
use rustix::thread::{CpuSet, sched_getaffinity};
use stepwell::host::pool::{Pool, PoolConfig};

pub(crate) use bounds::{
    assert_follows, assert_padding_is_zero, bf16_above, bf16_below, code_values, decoded,
    neighbours,
};
pub(crate) use draw::{Draw, SPECIALS, Spread, counts, hypers};
pub(crate) use fp_control::flushing_subnormals;
pub(crate) use guarded::Guarded;
pub(crate) use held::{Held, Layout, MomentsKind, ParamKind, is_same, widest};

/// proptest's own default, which `PROPTEST_CASES` replaces: what the case counts of the tests are
/// measured against.
const CASES_DEFAULT: u32 = 256;

/// `native` cases, or as many times fewer (under emulation) or more as `PROPTEST_CASES` differs
/// from proptest's default.
pub(crate) fn cases(native: u32) -> Config {
    let cases = (native * Config::default().cases).div_ceil(CASES_DEFAULT);
    Config { cases, failure_persistence: None, ..Config::default() }
}

/// `native` repetitions, fewer where `PROPTEST_CASES` asks for fewer, but at least one.
pub(crate) fn scaled(native: usize) -> usize {
    let cases = Config::default().cases.min(CASES_DEFAULT) as usize;
    (native * cases).div_ceil(CASES_DEFAULT as usize)
}

/// Whether `PROPTEST_CASES` asks for less than everything.
pub(crate) fn is_hurried() -> bool {
    Config::default().cases < CASES_DEFAULT
}

/// A pool of this many workers; they share CPUs where there are fewer.
pub(crate) fn pool_of(workers: usize) -> Pool {
    let allowed = sched_getaffinity(None).expect("an affinity mask");
    let cpus: Vec<usize> =
        (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).take(workers).collect();
    let config = if cpus.len() == workers {
        PoolConfig { cpus: Some(cpus), ..PoolConfig::default() }
    } else {
        PoolConfig { threads: Some(workers), ..PoolConfig::default() }
    };
    Pool::new(&config).expect("a pool")
}

/// A pool that all tests of a file may use.
pub(crate) fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(|| pool_of(1))
}
