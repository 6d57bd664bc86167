// Creates images for the client tests.

// Returns a GIF image of one pixel, as bytes. Images with different values of `red` (0 to 255) have different colors.
export function gif(red) {
  const file = Buffer.from("R0lGODlhAQABAPAAAAAAAAAAACwAAAAAAQABAAACAkQBADs=", "base64");
  file[13] = red;
  return file;
}

export function dataURL(file) {
  return `data:image/gif;base64,${file.toString("base64")}`;
}
