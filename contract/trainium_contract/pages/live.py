"""Keep an open page up to date, under a policy for the browser.

The script requests the page again and replaces the sections that have changed, so nothing flickers, and selections and
scroll positions elsewhere stay. It reads text from its own address only; markup inside a value could neither run (the
policy allows this script only, by its digest) nor load anything.

Invariants: there is one request at a time, and none while the page is hidden. Without a response, or after a refusal,
the page shows its age, and requests become less frequent, down to one a minute.
"""

from __future__ import annotations

from trainium_contract.pages.html import STYLE, csp_digest

EVERY_SECONDS = 5
LIVE_SCRIPT = """
(() => {
  const every = %d000, quiet = document.getElementById('quiet');
  let since = Date.now(), wait = every, asking = false;
  const taken = (main, fresh) => {
    const ids = (of) => [...of.children].map((each) => each.id).join();
    if (ids(main) !== ids(fresh)) { main.replaceChildren(...fresh.children); return; }
    [...fresh.children].forEach((each, at) => {
      const old = main.children[at];
      if (old.outerHTML === each.outerHTML) return;
      const places = [...old.querySelectorAll('.scroll')].map((box) => box.scrollLeft);
      old.replaceWith(each);
      each.querySelectorAll('.scroll').forEach((box, which) => { box.scrollLeft = places[which] || 0; });
    });
  };
  const look = async () => {
    if (document.hidden || asking) return;
    asking = true;
    try {
      const answer = await fetch(location.href, {
        cache: 'no-store', redirect: 'error', signal: AbortSignal.timeout(20000),
      });
      const text = await answer.text();
      if (!answer.ok) throw new Error(text.length < 500 ? text : 'HTTP ' + answer.status);
      const fresh = new DOMParser().parseFromString(text, 'text/html').querySelector('main');
      if (fresh === null) throw new Error('another page came than was asked for');
      taken(document.querySelector('main'), fresh);
      since = Date.now();
      wait = every;
      quiet.hidden = true;
    } catch (error) {
      wait = Math.min(2 * wait, 12 * every);
      const seconds = Math.round((Date.now() - since) / 1000);
      quiet.textContent = 'What is shown is ' + seconds + ' s old. ' + error.message;
      quiet.hidden = false;
    } finally {
      asking = false;
    }
  };
  const again = async () => { await look(); setTimeout(again, wait); };
  setTimeout(again, every);
  document.addEventListener('visibilitychange', look);
})();
""".replace("%d000", f"{EVERY_SECONDS}000")
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {csp_digest(STYLE)}; script-src {csp_digest(LIVE_SCRIPT)}; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every live page."""
