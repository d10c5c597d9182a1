//! How large the pools are made.

use super::machine::Memory;
use crate::config::Amount;

/// Fewest tokens that `auto` gives to the device pool when memory allows.
const LEAST_AUTO_TOKENS: u64 = 32_768;
/// Whole contexts that `auto` makes room for.
const AUTO_CONTEXTS: u64 = 4;

/// Sizes of the two pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolSizes {
    /// Pages of the device pool; at least one.
    pub device_pages: u32,
    /// Pages of the host pool; 0 is none.
    pub host_pages: u32,
}

/// What the sizes are worked out from.
pub(super) struct Wanted {
    /// `cache.device_tokens`
    pub device_tokens: Amount,
    /// `cache.host_tokens`, in linker mode `cache.transit_tokens`; `None` without either.
    pub host_tokens: Option<Amount>,
    /// The host pages are transit pages.
    pub transit: bool,
    /// Tokens a page.
    pub page_size: u32,
    /// Bytes of a page in either pool.
    pub page_bytes: u64,
    /// Tokens of the model's context.
    pub context: u64,
    /// Memory of the machine, measured after the weights were loaded.
    pub memory: Option<Memory>,
    /// Memory of the device alone, free and in all, measured after the weights were loaded; `None` where it computes in the machine's.
    pub own_memory: Option<(u64, u64)>,
}

impl Wanted {
    fn host_key(&self) -> &'static str {
        if self.transit { "cache.transit_tokens" } else { "cache.host_tokens" }
    }
}

/// Works out the sizes. Tokens are rounded down to whole pages.
///
/// # Errors
/// Names the key whose value can't be right.
pub(super) fn pools(wanted: &Wanted) -> Result<PoolSizes, String> {
    let page = u64::from(wanted.page_size.max(1));
    let to_pages = |key: &str, tokens: u64| {
        let pages = tokens / page;
        u32::try_from(pages).map_err(|_| {
            let most = u64::from(u32::MAX).saturating_mul(page);
            format!("{key} = {tokens}: is more pages than 32 bits can count; takes at most {most}")
        })
    };
    // Of what is available, a quarter for the device pool and a half for the host pool: pools
    // take memory only as they fill, so a fresh start would not notice if they were too large.
    let affordable = |part: u64| match wanted.memory {
        Some(memory) => memory.available / part / wanted.page_bytes.max(1) * page,
        None => u64::MAX,
    };
    let device_tokens = match wanted.device_tokens {
        Amount::Fixed(tokens) => u64::from(tokens),
        Amount::Auto => {
            let most = match wanted.own_memory {
                // This memory is taken at once. A fifth of it stays for what a step needs.
                Some((free, _)) => free / 5 * 4 / wanted.page_bytes.max(1) * page,
                None => affordable(4),
            };
            (wanted.context.saturating_mul(AUTO_CONTEXTS)).max(LEAST_AUTO_TOKENS).min(most).max(page)
        }
    };
    if device_tokens < page {
        return Err(format!(
            "cache.device_tokens = {device_tokens}: takes at least one page, cache.page_size = {page} tokens"
        ));
    }
    let host_tokens = match wanted.host_tokens {
        None => 0,
        Some(Amount::Fixed(tokens)) if wanted.transit && u64::from(tokens) < page * 2 => {
            return Err(format!(
                "cache.transit_tokens = {tokens}: takes at least two pages, cache.page_size = {page} tokens"
            ));
        }
        Some(Amount::Fixed(0)) => 0,
        Some(Amount::Fixed(tokens)) if u64::from(tokens) < page => {
            return Err(format!(
                "cache.host_tokens = {tokens}: takes 0, or at least one page, cache.page_size = {page} tokens"
            ));
        }
        Some(Amount::Fixed(tokens)) => u64::from(tokens),
        Some(Amount::Auto) if wanted.transit => device_tokens.min(affordable(8)).max(page * 2),
        Some(Amount::Auto) => (device_tokens * 2).min(affordable(2)),
    };
    let sizes = PoolSizes {
        device_pages: to_pages("cache.device_tokens", device_tokens)?,
        host_pages: to_pages(wanted.host_key(), host_tokens)?,
    };
    check_memory(wanted, sizes)?;
    Ok(sizes)
}

fn check_memory(wanted: &Wanted, sizes: PoolSizes) -> Result<(), String> {
    let tokens = |pages: u32| u64::from(pages) * u64::from(wanted.page_size);
    // Tokens of whole pages that so much memory holds.
    let fitting = |bytes: u64| bytes / wanted.page_bytes.max(1) * u64::from(wanted.page_size);
    let token_bytes = wanted.page_bytes / u64::from(wanted.page_size.max(1));
    let mut pages = u64::from(sizes.host_pages);
    match wanted.own_memory {
        Some((free, _)) => {
            let bytes = u64::from(sizes.device_pages).saturating_mul(wanted.page_bytes);
            if bytes > free {
                return Err(format!(
                    "cache.device_tokens = {} needs {} of the GPU's memory at {token_bytes} bytes a token, more than the {} that \
                     are free; takes at most {}; leave it out for a size that fits",
                    tokens(sizes.device_pages),
                    super::machine::size(bytes),
                    super::machine::size(free),
                    fitting(free),
                ));
            }
        }
        None => pages += u64::from(sizes.device_pages),
    }
    let Some(memory) = wanted.memory else { return Ok(()) };
    let bytes = pages.saturating_mul(wanted.page_bytes);
    if bytes <= memory.total {
        return Ok(());
    }
    let (needed, total) = (super::machine::size(bytes), super::machine::size(memory.total));
    let (device, host) = (tokens(sizes.device_pages), tokens(sizes.host_pages));
    let (key, most) = (wanted.host_key(), fitting(memory.total));
    let what = match (wanted.own_memory, sizes.host_pages) {
        (Some(_), _) => format!("{key} = {host} needs"),
        (None, 0) => format!("cache.device_tokens = {device} needs"),
        (None, _) => format!("cache.device_tokens = {device} and {key} = {host} need"),
    };
    let together = if wanted.own_memory.is_none() && host > 0 { " together" } else { "" };
    Err(format!(
        "{what} {needed} of memory at {token_bytes} bytes a token, more than the {total} of this machine, which hold {most} tokens{together}; make \
         them fewer, or leave them out"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn wanted(device: Amount, host: Option<Amount>) -> Wanted {
        Wanted {
            device_tokens: device,
            host_tokens: host,
            transit: false,
            page_size: 16,
            page_bytes: 16 * 23_040,
            context: 8192,
            memory: Some(Memory { total: 16 * GIB, available: 12 * GIB }),
            own_memory: None,
        }
    }

    #[test]
    fn a_device_with_memory_of_its_own_is_sized_by_that() {
        let mut on_gpu = wanted(Amount::Auto, Some(Amount::Auto));
        on_gpu.own_memory = Some((GIB / 4, GIB));
        let sizes = pools(&on_gpu).unwrap();
        let bytes = u64::from(sizes.device_pages) * on_gpu.page_bytes;
        assert!(bytes <= GIB / 5 && bytes > GIB / 6, "{sizes:?}");
        // The machine's memory is the host pool's alone.
        on_gpu.memory = Some(Memory { total: GIB, available: GIB / 2 });
        on_gpu.own_memory = Some((100 * GIB, 100 * GIB));
        on_gpu.device_tokens = Amount::Fixed(1_000_000);
        let sizes = pools(&on_gpu).unwrap();
        assert!(u64::from(sizes.host_pages) * on_gpu.page_bytes <= GIB / 4, "{sizes:?}");
        on_gpu.own_memory = Some((GIB, 100 * GIB));
        let error = pools(&on_gpu).unwrap_err();
        assert!(error.contains("cache.device_tokens = 1000000 needs 21.46 GiB of the GPU's memory"), "{error}");
    }

    #[test]
    fn auto_makes_room_for_a_few_contexts() {
        let sizes = pools(&wanted(Amount::Auto, Some(Amount::Auto))).unwrap();
        assert_eq!(sizes, PoolSizes { device_pages: 2048, host_pages: 4096 });
    }

    #[test]
    fn auto_stays_within_memory() {
        let mut tight = wanted(Amount::Auto, Some(Amount::Auto));
        tight.memory = Some(Memory { total: GIB, available: GIB / 2 });
        let sizes = pools(&tight).unwrap();
        let bytes = u64::from(sizes.device_pages + sizes.host_pages) * tight.page_bytes;
        assert!(bytes <= GIB / 2, "{sizes:?}");
        tight.memory = Some(Memory { total: GIB, available: 0 });
        assert_eq!(pools(&tight).unwrap(), PoolSizes { device_pages: 1, host_pages: 0 });
    }

    #[test]
    fn given_sizes_are_rounded_down_and_checked() {
        let fixed = |device, host| pools(&wanted(Amount::Fixed(device), Some(Amount::Fixed(host))));
        assert_eq!(fixed(100, 0).unwrap(), PoolSizes { device_pages: 6, host_pages: 0 });
        assert!(fixed(15, 0).unwrap_err().starts_with("cache.device_tokens = 15: "));
        assert!(fixed(16, 8).unwrap_err().starts_with("cache.host_tokens = 8: "));
        let error = fixed(1_000_000, 16).unwrap_err();
        assert!(
            error.contains("more than the 16.00 GiB of this machine, which hold 745648 tokens together"),
            "{error}"
        );
        let error = fixed(1_000_000, 0).unwrap_err();
        assert!(
            error.starts_with("cache.device_tokens = 1000000 needs ") && error.contains("which hold 745648 tokens;"),
            "{error}"
        );
    }

    #[test]
    fn transit_pages_are_as_many_as_the_device_has_as_far_as_memory_goes() {
        let mut linked = Wanted { transit: true, ..wanted(Amount::Auto, Some(Amount::Auto)) };
        assert_eq!(pools(&linked).unwrap(), PoolSizes { device_pages: 2048, host_pages: 2048 });
        linked.memory = Some(Memory { total: GIB, available: GIB / 2 });
        let sizes = pools(&linked).unwrap();
        assert!(u64::from(sizes.host_pages) * linked.page_bytes <= GIB / 16 && sizes.host_pages > 2, "{sizes:?}");
        linked.memory = Some(Memory { total: GIB, available: 0 });
        assert_eq!(pools(&linked).unwrap().host_pages, 2, "one for loads and one for offloads");
        linked.host_tokens = Some(Amount::Fixed(31));
        assert!(pools(&linked).unwrap_err().starts_with("cache.transit_tokens = 31: takes at least two pages"));
    }

    #[test]
    fn without_a_host_tier_there_is_no_host_pool() {
        assert_eq!(pools(&wanted(Amount::Fixed(64), None)).unwrap().host_pages, 0);
    }
}
