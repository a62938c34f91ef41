//! Parsers of other crates on bytes that nobody vouches for.
//!
//! Such a parser may panic where it should return an error: an `unwrap` on a missing key, an index that the
//! file made up. Its caller has nothing half-changed to lose (the bytes stay, the value is dropped), so a
//! panic is caught here and becomes text; nothing is printed. All other panics are reported as ever.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread will be caught and told by a message.
    static SILENT: Cell<bool> = const { Cell::new(false) };
}

/// What `parse` returns, or what it said when it panicked.
pub fn caught<T>(parse: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let reported = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !SILENT.get() {
                reported(panic);
            }
        }));
    });
    let outer = SILENT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(parse));
    SILENT.set(outer);
    result.map_err(|payload| first_line(payload.as_ref()))
}

fn first_line(payload: &(dyn Any + Send)) -> String {
    const MAX_CHARACTERS: usize = 200;
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    text.lines().next().unwrap_or_default().chars().take(MAX_CHARACTERS).collect()
}

#[cfg(test)]
mod tests {
    use super::caught;

    #[test]
    fn a_panic_becomes_its_first_line() {
        assert_eq!(caught(|| 1), Ok(1));
        let list: Vec<u8> = Vec::new();
        assert_eq!(caught(|| list[3]).unwrap_err(), "index out of bounds: the len is 0 but the index is 3");
        assert_eq!(caught(|| panic!("one\ntwo")), Err::<(), _>("one".to_string()));
        // A panic inside of a caught one leaves the outer one silent, too.
        let nested = caught(|| {
            assert!(caught(|| panic!("inner")).is_err());
            panic!("outer")
        });
        assert_eq!(nested, Err::<(), _>("outer".to_string()));
    }
}
