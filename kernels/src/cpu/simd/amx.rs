//! AMX: products of tiles of bytes, 16 rows of 64 at once.
//!
//! The instructions have no stable intrinsics, so they are written as assembly. A process must ask the system for the tiles'
//! state before its first use; a thread says with [`Amx::begin`] how large its tiles are.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Bytes of a row of a tile.
pub(crate) const TILE_ROW: usize = 64;

/// Proof that the machine has AMX tiles and byte products, and that this process may use them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

impl Amx {
    pub(crate) fn detect() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        FOUND.get_or_init(|| machine_has() && system_allows()).then_some(Self(()))
    }

    /// Says that this thread uses tiles 0 to 3 and 6 with `rows` rows (at most 16), the others with 16.
    pub(crate) fn begin(self, rows: usize) -> Session {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let rows = rows.clamp(1, 16) as u8;
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(TILE_ROW as u16);
        config.rows[..8].copy_from_slice(&[rows, rows, rows, rows, 16, 16, rows, rows]);
        // SAFETY: `self` exists, so the machine has the instruction and the process the permission; the operand is 64 bytes
        // as palette 1 wants them.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags)) };
        Session(self)
    }
}

/// A time in which this thread's tiles are configured.
pub(crate) struct Session(#[allow(dead_code, reason = "proof that the tiles may be used")] Amx);

impl Session {
    /// Multiplies the two tiles at `a` and at `a + 1024` (signed bytes `[rows][64]`) with the tile at `b` (unsigned bytes
    /// `[16][16][4]`, element `4 i + j` of 64 of column `n` at `[i][n][j]`) and stores both products, `[rows][16]` of i32, at `c`
    /// and `c + 1024`.
    ///
    /// # Safety
    /// 2,048 bytes at `a` and at `c` and 1,024 at `b` are readable, those at `c` writable.
    #[inline(always)]
    pub(crate) unsafe fn multiply_pair(&self, a: *const u8, b: *const u8, c: *mut i32) {
        // SAFETY: the session exists, so tiles are configured; memory is the caller's promise. Tiles are not touched by
        // compiled code.
        unsafe {
            asm!(
                "tileloadd tmm4, [{b} + {row}]",
                "tileloadd tmm6, [{a} + {row}]",
                "tileloadd tmm7, [{a} + {row} + 1024]",
                "tilezero tmm0",
                "tdpbsud tmm0, tmm6, tmm4",
                "tilezero tmm1",
                "tdpbsud tmm1, tmm7, tmm4",
                "tilestored [{c} + {row}], tmm0",
                "tilestored [{c} + {row} + 1024], tmm1",
                a = in(reg) a,
                b = in(reg) b,
                c = in(reg) c,
                row = in(reg) TILE_ROW,
                options(nostack, preserves_flags),
            );
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the session exists, so the instruction does. Without tiles in use a change of threads has less to keep.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// Whether processor and system know tiles of bytes.
fn machine_has() -> bool {
    const XSAVE_IN_USE: u32 = 1 << 27;
    const TILES: u32 = 1 << 24;
    const BYTES: u32 = 1 << 25;
    const TILE_STATES: u64 = 0b11 << 17;
    // Without a leaf 7 its registers are another leaf's.
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & XSAVE_IN_USE == 0 {
        return false;
    }
    if __cpuid_count(7, 0).edx & (TILES | BYTES) != TILES | BYTES {
        return false;
    }
    // SAFETY: the system has XSAVE in use, so the instruction is there.
    let states = unsafe { _xgetbv(0) };
    states & TILE_STATES == TILE_STATES
}

/// Asks the system for the tiles' state, for all threads of this process.
#[cfg(target_os = "linux")]
fn system_allows() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let result: i64;
    // SAFETY: this call of the system takes two numbers and touches no memory of the process; the registers that a call
    // changes are named.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn system_allows() -> bool {
    false
}
