//! The paged KV pool of a device, and its exchange of pages with host memory.

use std::any::Any;

use crate::error::KernelError;
use crate::handle::handle;

/// Element type of a KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// Single precision.
    F32,
}

impl KvDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name used in configuration and in page keys: `f16`, `bf16`, `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

/// Geometry of a KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvSpec {
    /// Layers that keep keys and values.
    pub layers: usize,
    /// KV heads a layer.
    pub kv_heads: usize,
    /// Elements of a key, per head.
    pub head_dim_k: usize,
    /// Elements of a value, per head.
    pub head_dim_v: usize,
    /// Tokens a page, 1 to 256.
    pub page_tokens: usize,
    /// Pages in the pool.
    pub pages: usize,
    /// Element type of keys and values.
    pub dtype: KvDtype,
}

impl KvSpec {
    /// Bytes of the keys of one page, over all layers.
    pub const fn page_k_bytes(&self) -> usize {
        self.layers * self.kv_heads * self.page_tokens * self.head_dim_k * self.dtype.bytes()
    }

    /// Bytes of the values of one page, over all layers.
    pub const fn page_v_bytes(&self) -> usize {
        self.layers * self.kv_heads * self.page_tokens * self.head_dim_v * self.dtype.bytes()
    }

    /// Checks the geometry; gives the bytes of all keys and of all values. For implementers of [`crate::Device`].
    ///
    /// # Errors
    /// A size of zero, pages that are too many or too long, memory that can't be addressed.
    pub fn checked_bytes(&self) -> Result<(usize, usize), KernelError> {
        let refuse = |what, reason: String| Err(KernelError::Parameter { what, reason });
        if !(1..=256).contains(&self.page_tokens) {
            return refuse("page_tokens", format!("{} is not within 1 to 256", self.page_tokens));
        }
        for (what, n) in [
            ("layers", self.layers),
            ("kv_heads", self.kv_heads),
            ("head_dim_k", self.head_dim_k),
            ("head_dim_v", self.head_dim_v),
            ("pages", self.pages),
        ] {
            if n == 0 {
                return refuse(what, "must be at least 1".into());
            }
        }
        if u32::try_from(self.pages).is_err() {
            return refuse("pages", format!("{} is more than 32 bits can number", self.pages));
        }
        let bytes = |dim: usize| {
            [self.layers, self.pages, self.kv_heads, self.page_tokens, dim]
                .iter()
                .try_fold(self.dtype.bytes(), |a, b| a.checked_mul(*b))
                .filter(|n| isize::try_from(*n).is_ok())
                .ok_or_else(|| KernelError::Memory {
                    what: "a KV pool",
                    bytes: usize::MAX,
                    reason: format!("the size of {self:?} overflows"),
                })
        };
        Ok((bytes(self.head_dim_k)?, bytes(self.head_dim_v)?))
    }

    /// Bytes of one page: keys and values of all layers.
    pub const fn page_bytes(&self) -> usize {
        self.page_k_bytes() + self.page_v_bytes()
    }
}

/// Where one page lies in host memory, in any layout whose innermost axis is the elements of a
/// head. Element (layer, head, token, d) of the keys lies at
/// `k + layer * k_layer_stride + head * k_head_stride + token * k_token_stride + d * dtype bytes`;
/// values likewise. Strides are in bytes.
#[derive(Debug, Clone, Copy)]
pub struct HostPage {
    /// First byte of the page's keys.
    pub k: *mut u8,
    /// First byte of the page's values.
    pub v: *mut u8,
    /// From one layer's keys to the next layer's.
    pub k_layer_stride: usize,
    /// From one head's keys to the next head's.
    pub k_head_stride: usize,
    /// From one token's key to the next token's.
    pub k_token_stride: usize,
    /// From one layer's values to the next layer's.
    pub v_layer_stride: usize,
    /// From one head's values to the next head's.
    pub v_head_stride: usize,
    /// From one token's value to the next token's.
    pub v_token_stride: usize,
}

// SAFETY: a HostPage is addresses; whoever uses them vouches for them in a call of its own.
unsafe impl Send for HostPage {}
// SAFETY: as above.
unsafe impl Sync for HostPage {}

/// Keys and values of all layers, in pages of a fixed number of tokens, in device memory.
///
/// The pool does not know which pages are in use. Operations of the device read and write pages
/// through a plan; the copies below may run on any other thread at the same time, on other pages.
pub trait KvPool: Send + Sync {
    /// The pool's geometry.
    fn spec(&self) -> &KvSpec;

    /// For the device that made the pool.
    fn as_any(&self) -> &dyn Any;

    /// Makes host memory that pages are copied to and from known to the device, which then reads and writes it by itself; false where
    /// a device has no use for that. Copies to and from other memory work as well, only slower.
    ///
    /// # Safety
    /// The range stays mapped as long as the pool lives.
    unsafe fn pin_host(&self, at: *mut u8, bytes: usize) -> Result<bool, KernelError> {
        let _ = (at, bytes);
        Ok(false)
    }

    /// Copies one layer of a page to host memory.
    ///
    /// # Safety
    ///
    /// * Every byte that the strides of `dst` reach for this pool's geometry is valid for
    ///   writes, and nothing else reads or writes it during the call.
    /// * During the call no operation of the device and no other copy writes this layer of this
    ///   page.
    unsafe fn copy_layer_out(&self, page: u32, layer: usize, dst: &HostPage) -> Result<(), KernelError>;

    /// Copies one layer of a page from host memory.
    ///
    /// # Safety
    ///
    /// * Every byte that the strides of `src` reach for this pool's geometry is initialised and
    ///   valid for reads, and nothing writes it during the call. The host page is only read.
    /// * During the call no operation of the device and no other copy reads or writes this layer
    ///   of this page.
    unsafe fn copy_layer_in(&self, page: u32, layer: usize, src: &HostPage) -> Result<(), KernelError>;

    /// Copies all layers of a page to host memory.
    ///
    /// # Safety
    ///
    /// As [`KvPool::copy_layer_out`], for all layers.
    unsafe fn copy_page_out(&self, page: u32, dst: &HostPage) -> Result<(), KernelError> {
        for layer in 0..self.spec().layers {
            // SAFETY: the caller promises for all layers what the copy of one layer asks for.
            unsafe { self.copy_layer_out(page, layer, dst)? };
        }
        Ok(())
    }

    /// Copies all layers of a page from host memory.
    ///
    /// # Safety
    ///
    /// As [`KvPool::copy_layer_in`], for all layers.
    unsafe fn copy_page_in(&self, page: u32, src: &HostPage) -> Result<(), KernelError> {
        for layer in 0..self.spec().layers {
            // SAFETY: the caller promises for all layers what the copy of one layer asks for.
            unsafe { self.copy_layer_in(page, layer, src)? };
        }
        Ok(())
    }

    /// Copies all layers of pages to host memory.
    ///
    /// # Safety
    ///
    /// As [`KvPool::copy_layer_out`], for all layers of all pages, which are all different.
    unsafe fn copy_pages_out(&self, pages: &[(u32, HostPage)]) -> Result<(), KernelError> {
        for (page, dst) in pages {
            // SAFETY: the caller promises for all pages what the copy of one asks for.
            unsafe { self.copy_page_out(*page, dst)? };
        }
        Ok(())
    }

    /// Copies all layers of pages from host memory.
    ///
    /// # Safety
    ///
    /// As [`KvPool::copy_layer_in`], for all layers of all pages, whose device pages are all different.
    unsafe fn copy_pages_in(&self, pages: &[(u32, HostPage)]) -> Result<(), KernelError> {
        for (page, src) in pages {
            // SAFETY: the caller promises for all pages what the copy of one asks for.
            unsafe { self.copy_page_in(*page, src)? };
        }
        Ok(())
    }

    /// Pages that are best given to one call of [`KvPool::copy_pages_out`] or [`KvPool::copy_pages_in`].
    fn pages_at_once(&self) -> usize {
        2
    }

    /// Starts to copy all layers of pages to host memory, behind all operations of the device that were called before.
    ///
    /// # Safety
    ///
    /// As [`KvPool::copy_pages_out`], until the transfer has been waited for or dropped; operations that are called
    /// after [`Transfer::before_layer`] may write the device pages before.
    unsafe fn begin_pages_out(&self, pages: &[(u32, HostPage)]) -> Result<Box<dyn Transfer>, KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_pages_out(pages)? };
        Ok(Box::new(Arrived))
    }

    /// Starts to copy all layers of pages from host memory, the first layer first.
    ///
    /// # Safety
    ///
    /// As [`KvPool::copy_pages_in`], until the transfer has been waited for or dropped; operations that are called
    /// after [`Transfer::before_layer`] may read that layer of the device pages before.
    unsafe fn begin_pages_in(&self, pages: &[(u32, HostPage)]) -> Result<Box<dyn Transfer>, KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_pages_in(pages)? };
        Ok(Box::new(Arrived))
    }

    /// CRC-32C of the keys of each layer, then of the values of each layer, of each of `pages`. The bytes are taken token by token and of each the
    /// heads, or with `by_heads` head by head and of each the tokens. They are those behind all operations of the device that were called before
    /// `moment`, or without one before this call; the caller has waited for transfers himself. `None` where the host can do it as well itself.
    ///
    /// # Errors
    /// A page that is not there, a failure of the device.
    fn checksums(
        &self,
        pages: &[u32],
        by_heads: bool,
        moment: Option<&Moment>,
    ) -> Result<Option<Vec<u32>>, KernelError> {
        let _ = (pages, by_heads, moment);
        Ok(None)
    }

    /// The point behind all operations of the device that were called before.
    ///
    /// # Errors
    /// A failure of the device.
    fn moment(&self) -> Result<Moment, KernelError> {
        Ok(Moment::from_parts(Box::new(())))
    }

    /// Waits until all operations of the device that were called before `moment` have run.
    ///
    /// # Errors
    /// A failure of the device.
    fn pass(&self, moment: &Moment) -> Result<(), KernelError> {
        let _ = moment;
        Ok(())
    }

    /// Where keys and values lie, for others who move pages of a device by themselves; `None` where they lie in no memory of a device. The memory is
    /// there as long as the pool.
    fn device_memory(&self) -> Option<DeviceRanges> {
        None
    }

    /// Starts to copy one layer of pages from host memory, behind what was called before `moment`; what was called after it is not waited for,
    /// so that layers come while earlier ones are computed with.
    ///
    /// # Safety
    ///
    /// As [`KvPool::begin_pages_in`], of that layer; and what was called after the moment does not touch that layer of the pages.
    unsafe fn begin_layer_in(
        &self,
        moment: &Moment,
        layer: usize,
        pages: &[(u32, HostPage)],
    ) -> Result<Box<dyn Transfer>, KernelError> {
        let _ = moment;
        for (page, host) in pages {
            // SAFETY: the caller's promise.
            unsafe { self.copy_layer_in(*page, layer, host)? };
        }
        Ok(Box::new(Arrived))
    }
}

/// The memory of a pool on a device: keys and values, each `[layer][page][head][token][element]` without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRanges {
    /// Address of the first key on the device.
    pub keys: u64,
    /// Bytes of all keys.
    pub key_bytes: usize,
    /// Address of the first value on the device.
    pub values: u64,
    /// Bytes of all values.
    pub value_bytes: usize,
    /// UUID of the device.
    pub uuid: [u8; 16],
}

handle! {
    /// A point in the order of a device's operations: behind all that were called before it was made.
    Moment {}
}

/// Pages on their way between device and host. Dropping it waits for them.
pub trait Transfer: Send + Sync {
    /// Lets every operation of the device that is called later wait for the copy of `layer`; the caller does not wait.
    ///
    /// # Errors
    /// A failure of the device.
    fn before_layer(&self, layer: usize) -> Result<(), KernelError>;

    /// Whether all of them have been copied.
    ///
    /// # Errors
    /// A failure of the device.
    fn is_done(&self) -> Result<bool, KernelError>;

    /// Waits until all of them have been copied.
    ///
    /// # Errors
    /// A failure of the device, also of a copy.
    fn wait(&self) -> Result<(), KernelError>;
}

/// A transfer that was over when it began.
#[derive(Debug, Clone, Copy, Default)]
pub struct Arrived;

impl Transfer for Arrived {
    fn before_layer(&self, _: usize) -> Result<(), KernelError> {
        Ok(())
    }

    fn is_done(&self) -> Result<bool, KernelError> {
        Ok(true)
    }

    fn wait(&self) -> Result<(), KernelError> {
        Ok(())
    }
}
