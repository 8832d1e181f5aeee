// Numbers for people. What is not known is a dash.

export const DASH = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const known = (value) => value !== null && value !== undefined;

export const count = (value) => (known(value) ? whole.format(value) : DASH);

/** A rate: one decimal below 100 where there is one. */
export function rate(value) {
  if (!known(value)) return DASH;
  return value < 99.95 && !Number.isInteger(value) ? value.toFixed(1) : whole.format(value);
}

export function percent(share) {
  if (!known(share)) return DASH;
  const hundredths = share * 100;
  return `${hundredths > 0 && hundredths < 9.95 ? hundredths.toFixed(1) : Math.round(hundredths)} %`;
}

/** Three digits, in milliseconds below a second. */
export function seconds(value) {
  if (!known(value)) return DASH;
  if (value < 1) return `${digits(value * 1000)} ms`;
  return value < 100 ? `${digits(value)} s` : age(value);
}

const digits = (value) => (value === 0 ? "0" : value.toPrecision(Math.max(3, String(Math.trunc(value)).length)));

export function bytes(value) {
  if (!known(value)) return DASH;
  if (value < 2 ** 20) return `${whole.format(value / 2 ** 10)} KiB`;
  if (value < 2 ** 30) return `${value < 10 * 2 ** 20 ? (value / 2 ** 20).toFixed(1) : whole.format(value / 2 ** 20)} MiB`;
  return `${(value / 2 ** 30).toFixed(value < 100 * 2 ** 30 ? 1 : 0)} GiB`;
}

/** A duration in its two largest units. */
export function age(value) {
  if (!known(value)) return DASH;
  const total = Math.floor(value);
  if (total < 60) return `${total} s`;
  const two = (number) => String(number).padStart(2, "0");
  if (total < 3600) return `${Math.floor(total / 60)} m ${two(total % 60)} s`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${two(Math.floor((total % 3600) / 60))} m`;
  return `${Math.floor(total / 86400)} d ${two(Math.floor((total % 86400) / 3600))} h`;
}
