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
    /// `cache.host_tokens`; `None` without a host tier.
    pub host_tokens: Option<Amount>,
    /// Tokens a page.
    pub page_size: u32,
    /// Bytes of a page in either pool.
    pub page_bytes: u64,
    /// Tokens of the model's context.
    pub context: u64,
    /// Memory of the machine, measured after the weights were loaded.
    pub memory: Option<Memory>,
}

/// Works out the sizes. Tokens are rounded down to whole pages.
///
/// # Errors
/// Names the key whose value can't be right.
pub(super) fn pools(wanted: &Wanted) -> Result<PoolSizes, String> {
    let page = u64::from(wanted.page_size.max(1));
    let to_pages = |key: &str, tokens: u64| {
        let pages = tokens / page;
        u32::try_from(pages).map_err(|_| format!("{key} = {tokens}: is more pages than 32 bits can count"))
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
            (wanted.context.saturating_mul(AUTO_CONTEXTS)).max(LEAST_AUTO_TOKENS).min(affordable(4)).max(page)
        }
    };
    if device_tokens < page {
        return Err(format!(
            "cache.device_tokens = {device_tokens}: takes at least one page, cache.page_size = {page} tokens"
        ));
    }
    let host_tokens = match wanted.host_tokens {
        None => 0,
        Some(Amount::Fixed(0)) => 0,
        Some(Amount::Fixed(tokens)) if u64::from(tokens) < page => {
            return Err(format!(
                "cache.host_tokens = {tokens}: takes 0, or at least one page, cache.page_size = {page} tokens"
            ));
        }
        Some(Amount::Fixed(tokens)) => u64::from(tokens),
        Some(Amount::Auto) => (device_tokens * 2).min(affordable(2)),
    };
    let sizes = PoolSizes {
        device_pages: to_pages("cache.device_tokens", device_tokens)?,
        host_pages: to_pages("cache.host_tokens", host_tokens)?,
    };
    check_memory(wanted, sizes)?;
    Ok(sizes)
}

fn check_memory(wanted: &Wanted, sizes: PoolSizes) -> Result<(), String> {
    let Some(memory) = wanted.memory else { return Ok(()) };
    let pages = u64::from(sizes.device_pages) + u64::from(sizes.host_pages);
    let bytes = pages.saturating_mul(wanted.page_bytes);
    if bytes <= memory.total {
        return Ok(());
    }
    let token_bytes = wanted.page_bytes / u64::from(wanted.page_size.max(1));
    Err(format!(
        "cache.device_tokens = {} and cache.host_tokens = {} need {} of memory at {token_bytes} bytes a token, \
         more than the {} of this machine; make them smaller, or leave them out",
        u64::from(sizes.device_pages) * u64::from(wanted.page_size),
        u64::from(sizes.host_pages) * u64::from(wanted.page_size),
        super::machine::size(bytes),
        super::machine::size(memory.total),
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
            page_size: 16,
            page_bytes: 16 * 23_040,
            context: 8192,
            memory: Some(Memory { total: 16 * GIB, available: 12 * GIB }),
        }
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
        assert!(error.contains("more than the 16.00 GiB of this machine"), "{error}");
    }

    #[test]
    fn without_a_host_tier_there_is_no_host_pool() {
        assert_eq!(pools(&wanted(Amount::Fixed(64), None)).unwrap().host_pages, 0);
    }
}
